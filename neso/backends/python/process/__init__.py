"""Python models in processes of their own.

Server side: `process_instances` (queues, restarts) -> `running_model` (one process with an initialized model) ->
`model_process` (socket, child process), with `server_requests` for calls from the model to the server.
Child side: `bootstrap` -> `child` (runs the same `ModelInstance` as a thread would) -> `remote_server`.
Both sides: `messages`, their encoding in `codec`, and `shared_memory` for large tensors.
"""
