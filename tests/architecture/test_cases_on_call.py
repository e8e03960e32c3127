"""Faults that users of other servers have suffered, on call: each case that is marked 5 is a test. The names are those
of the cases; a test that goes, or is renamed, fails here."""

import ast

import pytest

from tests.architecture.test_cases import TESTS

CASES: dict[str, list[str]] = {
    "21 throughput collapses when KV is full, and nobody knows who was preempted": [
        "runbooks/test_provoked.py: test_a_cache_that_is_too_small_is_told_and_the_same_load_with_room_is_none",
        "runbooks/test_case_21.py: test_every_preemption_is_on_record_with_its_request_the_tokens_lost_and_why",
    ],
    "27 running for hours without a token": [
        "runbooks/test_provoked_memory.py: test_requests_that_run_without_tokens_are_told",
    ],
    "37 no hits, as the shared prefix is shorter than a block": [
        "runbooks/test_provoked.py: test_a_shared_beginning_shorter_than_a_block_is_told",
        "runbooks/test_provoked.py: test_a_beginning_of_a_whole_block_hits_and_is_no_finding",
    ],
    "43 one alert, six dashboards, no idea where to start": [
        "runbooks/test_doctor.py: test_from_an_alert_to_its_runbook_is_one_command",
        "runbooks/test_shelf.py: test_every_alert_leads_to_a_runbook_that_exists",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    assert CASES[case]
    for named in CASES[case]:
        file, function = named.split(": ")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in found, f"{file} has no {function}"
