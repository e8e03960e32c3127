"""Loop lag: how late an asyncio loop wakes up, so that a starving loop is visible.

Enter at `watch`, as a task of the loop that is to be watched.
"""

import asyncio
import time
from collections.abc import Callable

from telemetry.events import Event, LoopLag

PERIOD_SECONDS = 0.1
SAMPLES = 10


async def watch(
    loop: str,
    publish: Callable[[Event], None],
    period_seconds: float = PERIOD_SECONDS,
    samples: int = SAMPLES,
) -> None:
    """Sleep, see how much later than asked it woke, publish `samples` of these as one LoopLag; until cancelled.

    `loop` is one of events.LOOPS.
    """
    lags: list[int] = []
    while True:
        due = time.monotonic_ns() + round(period_seconds * 1e9)
        await asyncio.sleep(period_seconds)
        now_ns = time.monotonic_ns()
        lags.append(max(0, now_ns - due) // 1000)
        if len(lags) >= samples:
            publish(LoopLag(at_ns=now_ns, loop=loop, lags_us=tuple(lags)))
            lags.clear()
