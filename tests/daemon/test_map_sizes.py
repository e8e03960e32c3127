"""Every queue and map that grows under load has a size gauge: found by walking the objects, not by a list (case 15)."""

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemon.instruments import Instruments
from tests.fakes.api import MODEL, serving
from tests.fakes.looped import LoopedPort

OURS = ("engine.", "daemon.", "telemetry.")
LIVE = 37


def attributes(thing: object) -> Iterator[tuple[str, Any]]:
    names = set(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    for name in sorted(names):
        value = getattr(thing, name, None)
        if value is not None:
            yield name, value


def containers(root: object, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Path and length of every dict, list, set and unbounded deque among the attributes of objects of ours; what lies
    in a container is not looked into."""
    for name, value in attributes(root):
        if id(value) in seen:
            continue
        where = f"{path}.{name}"
        if isinstance(value, dict | list | set) or (isinstance(value, deque) and value.maxlen is None):
            seen.add(id(value))
            yield where, len(value)
        elif type(value).__module__.startswith(OURS):
            seen.add(id(value))
            yield from containers(value, where, seen)


def test_the_walk_finds_what_lies_deep() -> None:
    class Inner:
        __slots__ = ("kept",)

        def __init__(self) -> None:
            self.kept = {1: 2}

    class Outer:
        def __init__(self) -> None:
            self.inner, self.last = Inner(), deque([1], maxlen=4)

    for kind in (Inner, Outer):
        kind.__module__ = "engine.x"
    assert list(containers(Outer(), "o", set())) == [("o.inner.kept", 1)]


async def test_what_grows_with_requests_has_a_gauge_that_grows_with_it(tmp_path: Path) -> None:
    port = LoopedPort(rows=8, kv_blocks=512)
    with Instruments(MODEL, tmp_path, "0") as instruments:
        async with port, serving(port) as api:
            port.on_step = lambda _: None
            roots = {"engine": port.engine, "kitchen": api.kitchen, "instruments": instruments}

            def walked() -> dict[str, int]:
                seen: set[int] = set()
                return {path: size for name, root in roots.items() for path, size in containers(root, name, seen)}

            def gauges() -> dict[str, int]:
                return {**port.engine.sizes(), **api.kitchen.sizes(), **instruments._sizes()}

            before, gauged_before = walked(), gauges()
            ask = {"model": MODEL, "prompt": "some words " * 4, "max_tokens": 40}
            clients = [asyncio.create_task(api.post("/v1/completions", ask)) for _ in range(LIVE)]
            async with asyncio.timeout(60):
                while len(port.engine.scheduler.views()) < LIVE or not any(
                    v.row >= 0 for v in port.engine.scheduler.views()
                ):
                    await asyncio.sleep(0)
            port.pause()
            for event in api.events:
                instruments.publish(event)
            instruments._bus.flush(10.0)
            grown = {
                path: size - before.get(path, 0) for path, size in walked().items() if size > before.get(path, 0) + 2
            }
            sizes = gauges()
            gauged = {size - gauged_before.get(name, 0) for name, size in sizes.items()}
            port.resume()
            async with asyncio.timeout(60):
                await asyncio.gather(*clients)
            await api.settled(LIVE, timeout_s=60)
    assert len(grown) > 5, "the walk sees the engine's and the daemon's maps"
    nameless = {path: more for path, more in grown.items() if more not in gauged}
    assert not nameless, (nameless, sizes)
