"""Python models in separate processes.

Server side: `process_instances` (queues, restarts) -> `running_model` (one process with an initialized model) ->
`model_process` (socket, child process), with `server_requests` for calls from the model to the server.
Child side: `bootstrap` -> `child` (runs the same `ModelInstance` as an instance thread) -> `remote_server`.
Both sides: `messages`, their encoding in `codec`, and `shared_memory` for large tensors.
"""
