"""Faults that users of other inference servers have reported, by their numbers in the catalogue, and the tests that
provoke each: as `path under tests: function`. A row without its tests fails here, and so does a test that is gone."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

CASES: dict[str, list[str]] = {
    "7 aborted requests leak blocks": [
        "engine/test_scheduler_cases.py: test_case_7_requests_aborted_at_any_stage_leave_no_block_and_no_entry_behind",
        "properties/test_state_machine.py: test_promises_hold_for_any_history",
        "real/test_survival.py: test_clients_come_and_go",
    ],
    "9 memory stays taken after a crash while it stops or loads": [
        "daemon/test_session.py: test_killed_while_it_stops_the_drain_still_ends",
        "daemon/test_session.py: test_killed_while_it_loads_it_is_started_again",
        "daemon/test_session.py: test_an_engine_that_does_not_stop_is_killed",
    ],
    "10 the context exceeds what the KV memory holds": [
        "engine/test_budget_plan.py: test_auto_context_is_the_largest_that_fits_and_says_so",
        "engine/test_budget_plan.py: test_an_explicit_context_that_cannot_fit_is_refused_with_the_largest_that_does",
        "daemon/test_session_tiny_model.py: "
        "test_a_memory_limit_too_small_for_the_context_is_refused_before_anything_is_taken",
    ],
    "16 short prompts behind many long ones": [
        "engine/test_scheduler_cases.py: test_case_16_short_requests_do_not_wait_for_long_prompts_that_came_first",
    ],
    "17 one long prompt blocks all later ones": [
        "engine/test_scheduler_cases.py: test_case_17_one_long_prompt_does_not_block_later_ones",
        "engine/test_scheduler_cases.py: test_case_17_prompts_partly_computed_at_once_are_capped",
    ],
    "18 streams crawl during somebody's prefill": [
        "engine/test_scheduler_cases.py: "
        "test_case_18_running_streams_get_a_token_in_every_step_and_prefill_only_its_share",
    ],
    "20 preempted and resumed for ever": [
        "engine/test_scheduler_cases.py: test_case_20_a_pool_too_small_for_two_makes_progress_without_a_loop",
    ],
    "28 liveness equals readiness": ["daemon/test_api_serving.py: test_live_startup_and_ready_have_three_meanings"],
    "29 scale-down aborts streams": [
        "real/test_survival.py: test_sigterm_lets_running_streams_finish",
        "daemon/test_api_serving.py: test_stopping_finishes_streams_and_refuses_new_requests",
        "daemon/test_api_serving.py: test_a_stream_that_outlasts_the_grace_is_told_so",
    ],
    "30 generation goes on after the client left": [
        "engine/test_scheduler_cases.py: test_case_30_whoever_left_is_gone_before_the_next_step_at_every_stage",
        "daemon/test_api_leaving.py: test_leaving_while_the_request_waits_or_runs_cancels_it",
        "real/test_survival.py: test_a_client_that_left_is_aborted",
    ],
    "31 an unbounded queue": [
        "daemon/test_api_admission.py: test_five_thousand_requests_at_one_slot_are_shed_and_memory_stays_bounded",
        "daemon/test_api_admission.py: test_prompt_tokens_that_wait_are_bounded_too",
        "daemon/test_cases_served.py: "
        "test_case_31_two_thousand_requests_at_one_slot_are_shed_and_both_processes_stay_small",
    ],
    "36 recomputation counted as hits": [
        "engine/test_scheduler_cases.py: test_case_36_recomputation_is_no_hit",
        "daemon/test_cases_served.py: test_case_36_random_prompts_have_no_hits_even_when_they_are_preempted",
    ],
    "38 malformed JSON gives a bare 500": [
        "daemon/test_api_refusals.py: test_broken_bodies_routes_and_methods_are_json_errors_too",
        "daemon/test_api_refusals.py: test_no_body_is_a_500_or_a_dropped_connection",
        "daemon/test_api_refusals.py: test_what_is_no_http_is_a_400_and_one_line_in_the_log",
    ],
    "39 part of a stop string leaks": [
        "daemon/test_api_chat.py: test_stop_strings_never_leak_however_tokens_are_split",
        "daemon/test_api_chat.py: test_an_unfinished_stop_string_at_the_end_is_text",
        "real/test_openai_client.py: test_stop_string_is_never_shown",
    ],
    "40 usage missing or in every chunk": [
        "daemon/test_api_chat.py: test_usage_comes_in_exactly_one_chunk_without_choices_if_asked_for",
    ],
    "41 something of another request after the reuse of a row": [
        "engine/test_scheduler_cases.py: "
        "test_case_41_nothing_of_another_request_appears_after_an_abort_and_the_reuse_of_its_row",
        "daemon/test_cases_served.py: "
        "test_case_41_and_42_a_seed_gives_the_same_answer_alone_in_company_and_after_aborts",
    ],
    "42 a seed gives other text in company": [
        "daemon/test_cases_served.py: "
        "test_case_41_and_42_a_seed_gives_the_same_answer_alone_in_company_and_after_aborts",
        "real/test_greedy_reference.py: test_greedy_equals_transformers",
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
