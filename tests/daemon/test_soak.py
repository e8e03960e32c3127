"""10,000 short requests on a tiny model: memory stays flat in both processes, series and maps come back to idle."""

import json
from pathlib import Path

import pytest

from tests import soaking
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served, wait_for

# Twice what the longest window keeps (4,096 requests served): in the half that is judged, all of them are full.
REQUESTS = 10_000


@pytest.mark.timeout(600)
def test_10000_short_requests_leave_nothing_behind(tmp_path: Path) -> None:  # cases 8, 15
    prepare_tiny(tmp_path / "tiny", write_tiny("llama", tmp_path / "tiny"))
    args = ("--served-model-name", "tiny", "--max-num-seqs", "16", "--max-model-len", "64")  # a pool that is soon full
    with Served(tmp_path, str(tmp_path / "tiny"), *args) as served:
        wait_for(lambda: soaking.idle(served), 60, "idle, and it says so")
        before = soaking.sizes(served)
        soaked = soaking.soak(served, REQUESTS)
        assert soaked.requests == REQUESTS
        for process, found in soaked.slopes().items():
            assert found <= soaking.MOST_BYTES_A_REQUEST, f"{process}: {found:.0f} bytes a request"
        wait_for(
            lambda: soaking.idle(served) and not soaking.grown(served, before),
            60,
            f"the maps are as before: {soaking.grown(served, before)} (now, at first)",
        )
        late = soaking.series(served) - soaked.halfway
        assert len(late) < soaking.SELDOM, f"series that came with the second half: {sorted(late)}"
        _, body = served.control("/inferd/v1/incidents")
        assert json.loads(body)["incidents"] == []
