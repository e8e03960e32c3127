"""Case 21: throughput collapses because the KV cache is full. Who was preempted, what was lost and why is on record."""

from pathlib import Path

import pytest

from telemetry.client import Client, Endpoint
from telemetry.events import StepReport
from tests.runbooks.provoke import Patient
from tests.served import wait_for

pytestmark = pytest.mark.timeout(240)


def test_every_preemption_is_on_record_with_its_request_the_tokens_lost_and_why(tiny: Path, tmp_path: Path) -> None:
    """Overcommitted twice: eight requests at once, of 220 tokens each, on blocks for half of them."""
    with Patient(tmp_path, str(tiny), "--max-num-seqs", "8") as patient:
        patient.set_limits(kv_blocks=48)
        client = Client(Endpoint(socket=patient.runtime / "control.sock"))
        seen: dict[tuple[int, str], tuple[int, str]] = {}

        def preempted() -> bool:
            for step in client.snapshot(["steps"]).steps or []:
                assert isinstance(step, StepReport)
                for each in step.preemptions:
                    seen[step.step, each.request_id] = (each.tokens_lost, each.cause)
            return len(seen) >= 3

        with patient.under_load(8, 100, 120):
            wait_for(preempted, 60, "preemptions in the step reports")
            wait_for(
                lambda: any(r.preemptions for r in patient.evidence().served()), 60, "a request's own record of it"
            )
        for (_, request_id), (tokens_lost, cause) in seen.items():
            assert request_id
            assert tokens_lost > 0
            assert cause
        records = [record for record in patient.evidence().served() if record.preemptions]
        assert all(record.preempted_tokens > 0 for record in records)
        totals = patient.snapshot("totals")["totals"]
        assert sum(totals["preemptions"].values()) >= len(seen)
        assert sum(totals["preempted_tokens"].values()) >= sum(lost for lost, _ in seen.values())
