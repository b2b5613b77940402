"""The `python` backend: models written as Triton's `TritonPythonModel` classes.

What a model needs (pb_utils, the execution of a batch) is the same in a thread of the server and in a process of its own;
it imports no more than numpy and light parts of `neso.server`. `process` is what stands between in the second case.
"""
