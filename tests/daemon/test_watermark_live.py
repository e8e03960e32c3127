"""A real daemon under more load than fits below the watermark: what is active stays below it, others wait for blocks,
nobody is preempted, and everybody is served."""

from pathlib import Path

from tests.fakes.tiny_served import MODEL, Load, tiny_model
from tests.served import Served, wait_for

LINE = 60  # blocks of 16 tokens


def test_what_is_active_stays_below_the_watermark(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with Served(tmp_path, str(model), "--served-model-name", MODEL, "--memory-limit", "1GiB") as served:
        order = {"set": {"watermark_blocks": LINE, "charge_tokens": 256}, "why": "a small watermark"}
        status, body = served.control("/inferd/v1/tuner", "POST", order)
        assert status == 200, body
        with Load(served, clients=16, prompt="A river is " + "long " * 40, tokens=120) as load:
            active: list[int] = []

            def pressed() -> bool:
                shot = served.snapshot("kv,queue,requests")
                active.append(shot["kv"]["active"])
                return bool(shot["queue"]["waiting_kv"]) and load.answered >= 48

            wait_for(pressed, 120, "three rounds of answers, and a queue that waits for blocks")
        assert max(active) <= LINE
        assert max(active) >= 0.6 * LINE  # and it is used
        assert not any(served.snapshot("totals")["totals"]["preemptions"].values())
