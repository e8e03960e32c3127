"""Merge: the outputs of several choices as one stream of 'these have something new'.

Each choice is taken from only when what it had before was dealt with, so that a slow reader gives the engine no credit.
It must not know what is done with them. Enter at `outputs` (close it: `contextlib.aclosing`) and `next_output`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from daemon.api.choice import Choice
from engine.output import Output

Ready = Sequence[tuple[int, Choice]]


def outputs(choices: Sequence[Choice]) -> AsyncGenerator[Ready]:
    """(index, choice) of those that took an Output just now, until all are done."""
    return _one(choices[0]) if len(choices) == 1 else _several(choices)


async def next_output(choice: Choice) -> Output:
    """Its next Output. Raises StopAsyncIteration at the stream's end."""
    return await anext(aiter(choice.stream))


async def _one(choice: Choice) -> AsyncGenerator[Ready]:
    ready = ((0, choice),)
    async for output in choice.stream:
        choice.take(output)
        yield ready
    if not choice.done:
        choice.lost()
        yield ready


async def _several(choices: Sequence[Choice]) -> AsyncGenerator[Ready]:
    tasks: dict[asyncio.Task[Output], int] = {}

    def await_next(index: int) -> None:
        tasks[asyncio.create_task(next_output(choices[index]))] = index

    try:
        for index in range(len(choices)):
            await_next(index)
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            indices = sorted(tasks[task] for task in done)
            for task in done:
                _take(choices[tasks.pop(task)], task)
            yield [(index, choices[index]) for index in indices]
            for index in indices:
                if not choices[index].done:
                    await_next(index)
    finally:
        for task, index in tasks.items():
            if task.done():  # nothing that was taken from a stream is lost
                _take(choices[index], task)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # whoever reads a stream next is its only reader


def _take(choice: Choice, task: "asyncio.Task[Output]") -> None:
    """What a finished task of `next_output` brought."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        choice.take(task.result())
    elif isinstance(error, StopAsyncIteration):
        choice.lost()
    else:
        raise error
