"""A FastAPI application of your own before Neso's workers: POST /stories streams text.

Run it with any ASGI server: `uvicorn app:app --port 18080`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from neso.cluster import ClusterConfig, ClusterEngine, EngineConfig
from neso.engine.weights.hub import resolve_model
from neso.generation import GenerationRequest, InvalidParameter, SamplingParams

MODEL = os.environ.get("MODEL", "neso-pilot")


@asynccontextmanager
async def workers(app: FastAPI) -> AsyncIterator[None]:
    """Start one prefill worker and two decode workers, and start those again that end."""
    config = EngineConfig(
        model=str(resolve_model(MODEL)),
        cluster=ClusterConfig(prefill_workers=1, decode_workers=2, min_remote_prefill=64),
    )
    engine = await ClusterEngine.open(config)
    restarts: set[asyncio.Task[object]] = set()
    engine.local.on_dead(lambda number, _: restarts.add(asyncio.create_task(engine.local.restart(number))))
    app.state.engine = engine
    try:
        yield
    finally:
        await engine.stop()


app = FastAPI(lifespan=workers)


class Story(BaseModel):
    beginning: str
    max_tokens: int = 64


@app.post("/stories")
async def tell(story: Story, request: Request) -> StreamingResponse:
    """Stream the continuation. A client that disconnects cancels its request in the workers."""
    try:
        sampling = SamplingParams(temperature=0, max_tokens=story.max_tokens, ignore_eos=True)
        outputs = request.app.state.engine.generate(GenerationRequest(story.beginning, sampling))
        first = await anext(outputs)  # a request that is not valid gets a status, not a broken stream
    except InvalidParameter as error:
        raise HTTPException(400, str(error)) from None

    async def pieces() -> AsyncIterator[str]:
        async with aclosing(outputs):
            yield first.outputs[0].text
            async for output in outputs:
                yield output.outputs[0].text

    return StreamingResponse(pieces(), media_type="text/plain")


@app.get("/workers")
async def status(request: Request) -> dict[str, object]:
    """Show the workers and the queue."""
    engine = request.app.state.engine
    cluster = engine.cluster
    return {
        "queued": cluster.queue.num_waiting,
        "running": engine.num_requests,
        "workers": {worker.name: sorted(worker.roles) for worker in cluster.workers},
        "repeated": cluster.counters.retries,
    }
