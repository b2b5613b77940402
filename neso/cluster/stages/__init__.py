"""Stages: models of a repository on worker processes that pull requests by capacity.

`stage` has the queue of a model and its workers, on the server's side; `hub` the connections of all stages; `worker` is
a worker's side, and `messages` are what both send to each other.
"""
