"""The responses of several texts of one request."""

import asyncio

import numpy as np


async def merged(runs):
    """What several asynchronous iterators give, as it comes. Closing it, or an error of one, ends all of them."""
    queue = asyncio.Queue()

    async def drain(run):
        try:
            async for item in run:
                queue.put_nowait((item, None))
        except BaseException as error:
            queue.put_nowait((None, error))
            raise
        queue.put_nowait((None, None))

    tasks = [asyncio.create_task(drain(run)) for run in runs]
    try:
        left = len(tasks)
        while left:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in runs:
            await run.aclose()


def joined(responses):
    """Several responses as one: their rows, in the order of texts and of the sequences of each."""
    responses = sorted(
        responses, key=lambda outputs: (index_of(outputs, "batch_index"), index_of(outputs, "sequence_index"))
    )
    if len(responses) == 1:
        return responses[0]
    names = dict.fromkeys(name for outputs in responses for name in outputs)
    return {name: concatenated([outputs[name] for outputs in responses if name in outputs]) for name in names}


def index_of(outputs, name):
    return int(outputs[name].flat[0]) if name in outputs else 0


def concatenated(arrays):
    """Along the first dimension; where others differ, filled up with zeros."""
    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    filled = [
        np.pad(a, [(0, 0), *((0, n - m) for n, m in zip(shape, a.shape[1:], strict=True))]) for a in arrays
    ]
    return np.concatenate(filled) if arrays[0].ndim > 1 else np.concatenate(arrays)
