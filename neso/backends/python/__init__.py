"""Backend `python`: models written as Triton's `TritonPythonModel` classes.

Instances run in threads of the server, or in separate processes (`process`). The modules imported by a child process
(`pb_utils`, `model_instance` and their imports) need only numpy and light parts of `neso.server`.
"""
