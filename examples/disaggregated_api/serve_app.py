"""The application under Ray Serve: `serve run serve_app:stories`, with `pip install 'ray[serve]'`."""

from __future__ import annotations

from app import app
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 1})
@serve.ingress(app)
class Stories:
    """One replica with the queue and its workers, which are processes of this host."""


stories = Stories.bind()
