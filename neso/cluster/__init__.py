"""A model on workers: the work queue of the server process, and the worker processes that pull requests from it.

On the server's side, `front_end` has the requests and `connections` the workers; `worker` is a worker's side, and
`messages` are what both send to each other.
"""
