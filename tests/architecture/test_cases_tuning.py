"""Reported cases about limits and tuning, by their numbers, and the tests that provoke each: as in test_cases.py."""

import ast

import pytest

from tests.architecture.test_cases import TESTS

CASES: dict[str, list[str]] = {
    "34 a larger limit lowers throughput by a third": [
        "autotune/test_online.py: test_case_34_it_finds_the_knee_explains_and_does_not_oscillate",
        "daemon/test_tuner_live.py: test_it_changes_by_itself_rests_when_frozen_and_remembers_after_a_kill",
    ],
    "35 limits inferred at start differ from the flags, unexplained": [
        "engine/test_budget_plan.py: test_every_resolved_field_has_a_reason",
        "daemon/test_tuning.py: test_it_is_frozen_released_pinned_and_set_over_the_control_route",
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
