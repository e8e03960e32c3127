"""The rows of the request list: running, waiting and ended choices in one form, and its columns.

Pure. Enter at `requests`, `TABLE`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from telemetry.events import RequestRecord, RequestView
from tui.text import UNKNOWN, Span, count, nanoseconds
from tui.view import View
from tui.widgets.table import Column, Table

_ORDER = {"running": 0, "preempted": 1, "waiting": 2, "finished": 3}
_STYLES = {"running": "good", "waiting": "", "preempted": "warning", "finished": "dim"}


@dataclass(slots=True, kw_only=True)  # not frozen: thousands are made every second
class Row:
    """One choice. None is not reported. `age_ns`: since it arrived, or how long it took in all."""

    request_id: str
    state: str
    why: str = ""
    age_ns: int | None = None
    ttft_ns: int | None = None
    prompt: int | None = None
    output: int | None = None
    most: int | None = None
    cached: int | None = None
    blocks: int | None = None
    preemptions: int | None = None
    record: RequestRecord | None = None
    live: RequestView | None = None

    def matches(self, wanted: str) -> bool:
        """Every word of `wanted` is in the id, the state or the reason."""
        text = f"{self.request_id} {self.state} {self.why}".lower()
        return all(word in text for word in wanted.lower().split())


class Listed(Sequence[Row]):
    """The rows in order, each made when it is asked for: of thousands some forty are seen."""

    def __init__(self, sources: list[RequestView | RequestRecord], now_ns: int) -> None:
        self._sources = sources
        self._now_ns = now_ns

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> "Listed": ...
    def __getitem__(self, at: int | slice) -> "Row | Listed":
        if isinstance(at, slice):
            return Listed(self._sources[at], self._now_ns)
        source = self._sources[at]
        return _live(source, self._now_ns) if isinstance(source, RequestView) else _ended(source)

    def place(self, request_id: str) -> int | None:
        """Where that request is."""
        return next((at for at, each in enumerate(self._sources) if each.request_id == request_id), None)

    def matching(self, wanted: str) -> "Listed":
        """Those of which every word is in the id, the state or the reason."""
        kept = [source for source, row in zip(self._sources, self, strict=True) if row.matches(wanted)]
        return Listed(kept, self._now_ns)

    def ordered(self, by: str, descending: bool) -> "Listed":
        """Sorted by the column called `by`, as they are without one."""
        if not by:
            return self
        return Listed([self._sources[at] for at in TABLE.order(self, by, descending)], self._now_ns)


def requests(view: View) -> Listed:
    """Those in the engine, then those that ended, newest first."""
    live = sorted(view.live() or (), key=lambda each: _ORDER.get(each.state, 4))
    known = {each.request_id for each in live}
    ended = [record for record in reversed(view.records.values()) if record.request_id not in known]
    return Listed([*live, *ended], view.snapshot.at_ns if view.snapshot else 0)


def _live(view: RequestView, now_ns: int) -> Row:
    return Row(
        request_id=view.request_id,
        state=view.state,
        why=view.reason,
        age_ns=None if view.received_ns is None else max(0, now_ns - view.received_ns),
        prompt=view.prompt_tokens,
        output=view.output_tokens,
        most=view.max_tokens,
        cached=view.cached_tokens,
        blocks=view.blocks,
        preemptions=view.preemptions,
        live=view,
    )


def _ended(record: RequestRecord) -> Row:
    return Row(
        request_id=record.request_id,
        state="finished",
        why=record.error or record.reason,
        age_ns=record.at_ns - record.arrival_ns,
        ttft_ns=record.first_token_ns - record.arrival_ns if record.first_token_ns else None,
        prompt=record.prompt_tokens,
        output=record.output_tokens,
        most=record.max_tokens,
        cached=record.cached_tokens,
        blocks=record.kv_blocks,
        preemptions=record.preemptions,
        record=record,
    )


def _state(row: Row) -> Span:
    bad = row.state == "finished" and row.why not in ("stop", "length")
    return row.state, "warning" if bad else _STYLES.get(row.state, "")


def _figure(title: str, width: int, name: str, write: Callable[[Any], str] = count, least: int = 0) -> Column[Row]:
    return Column(
        title=title,
        width=width,
        text=lambda row: write(getattr(row, name)),
        key=lambda row: getattr(row, name),
        least=least,
    )


TABLE: Table[Row] = Table(
    [
        Column(
            title="state", width=9, text=_state, key=lambda row: -_ORDER.get(row.state, 4), figures=False
        ),
        Column(title="why", width=9, text=lambda row: row.why or UNKNOWN, key=lambda row: row.why, figures=False),
        _figure("age", 8, "age_ns", nanoseconds),
        _figure("TTFT", 8, "ttft_ns", nanoseconds, least=100),
        _figure("prompt", 7, "prompt"),
        _figure("cached", 7, "cached", least=100),
        _figure("output", 7, "output"),
        _figure("max", 6, "most", least=100),
        _figure("blocks", 6, "blocks"),
        _figure("lost", 5, "preemptions"),
        Column(title="id", width=0, text=lambda row: row.request_id, key=lambda row: row.request_id, figures=False),
    ]
)  # fmt: skip
