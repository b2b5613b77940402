"""The `python` backend: models written as Triton's `TritonPythonModel` classes.

Instances run in threads of the server, or in processes of their own (`process`). The modules that a child process
imports (`pb_utils`, `model_instance` and their imports) need only numpy and light parts of `neso.server`.
"""
