"""The `python` backend: models written as Triton's `TritonPythonModel` classes.

What a model needs (pb_utils, the execution of a batch) is the same in a thread of the server and in a process of its
own, and imports no more than numpy and light parts of `neso.server`. `process` is what it takes to have the second.
"""
