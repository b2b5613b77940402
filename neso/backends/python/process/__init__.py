"""Python models in processes of their own.

The server's side: `instances` → `instance` → `model_process` (spawn, socket) and `services` (what a model may ask).
The model's side: `bootstrap` → `child` (runs the same `ModelInstance` as a thread would) → `child_channel`,
`remote_server`. Both: `messages` and their `wire` form, and `exchange`, which passes tensors through shared memory.
"""
