"""A model on workers: the work queue of the server process, and the worker processes that pull requests from it.

`front_end` is the server's side, `worker` a worker's, `messages` are what they send to each other.
"""
