"""What each request's steps were: the rows of step reports, told apart by which request had the row.

Owns the map from row to request, and the pieces seen of the latest requests, both bounded. It must not know how they
are drawn. Enter at `Timelines.take`.
"""

import struct
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from telemetry.events import StepReport

_REQUESTS: Final = 512
_PIECES: Final = 512  # of one request; the oldest go first


@dataclass(frozen=True, slots=True)
class Piece:
    """One request's part of the step that began at `at_ns`: `count` positions from `start` on."""

    at_ns: int
    start: int
    count: int
    prompt: bool


class Timelines:
    """Pieces by request id. Requests that were admitted before we watched are not known by row, and left out."""

    def __init__(self) -> None:
        self._rows: dict[int, str] = {}
        self._pieces: OrderedDict[str, deque[Piece]] = OrderedDict()

    def take(self, report: StepReport) -> None:
        """A merged report has one begin for many steps: its pieces are taken as one instant."""
        for row, request_id in report.admitted:
            self._rows[row] = request_id
            if request_id not in self._pieces:
                self._pieces[request_id] = deque(maxlen=_PIECES)
                if len(self._pieces) > _REQUESTS:
                    self._pieces.popitem(last=False)
        prompt = report.prefill_rows + report.decode_rows > 0 and report.decode_rows == 0
        for row, start, count in struct.iter_unpack("<iii", report.rows[: len(report.rows) // 12 * 12]):
            pieces = self._pieces.get(self._rows.get(row, ""))
            if pieces is not None:
                pieces.append(Piece(report.at_ns, start, count, prompt or count > 1))
        for request_id in report.finished:
            for row in [row for row, holder in self._rows.items() if holder == request_id]:
                del self._rows[row]

    def of(self, request_id: str) -> list[Piece]:
        """Oldest first; empty for a request whose steps were not seen."""
        return list(self._pieces.get(request_id, ()))
