"""Faults that users of other inference servers have reported, by their numbers in the catalogue, and the tests that
provoke each: as `path under tests: function`. A row without its tests fails here, and so does a test that is gone."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

CASES: dict[str, list[str]] = {
    "1 log-probabilities of a prompt exhaust memory that was not planned": [
        "engine/test_loop.py: test_case_1_prompt_logprobs_fail_their_request_alone_with_50_others_running",
        "engine/test_budget_plan.py: test_prompt_logprobs_and_logits_are_counted",
        "daemon/test_drills.py: test_each_drill_once_in_random_order_under_load",
        "daemon/test_drills.py: test_log_probabilities_of_a_prompt_fail_alone_among_fifty_others",
    ],
    "2 out of memory, and no figures": [
        "telemetry/test_forensics.py: test_each_cause_is_found_with_evidence_for_it_and_against_every_other",
        "telemetry/test_postmortem.py: test_an_incident_becomes_a_bundle_with_ladder_steps_limits_and_requests",
    ],
    "3 what is inside the budget": [
        "telemetry/test_ladder.py: test_gaps_have_names_and_the_daemon_is_runtime",
        "engine/test_budget_plan.py: test_the_plan_counts_the_rows_and_the_table_of_positions",
        "real/test_memory_ledger.py: test_what_is_booked_explains_the_process_idle_loaded_and_after_and_a_hoard_shows",
    ],
    "4 another process holds the memory": [
        "telemetry/test_ladder.py: test_neighbours_are_what_of_the_limit_others_hold",
        "telemetry/test_ladder.py: test_two_daemons_on_one_device_are_neighbours_and_each_budget_is_its_own",
        "daemon/test_drills.py: test_each_drill_once_in_random_order_under_load",
    ],
    "5 no figure for fragmentation": [
        "telemetry/test_ladder.py: test_fragmentation_is_what_is_free_outside_the_largest_piece",
        "telemetry/test_forensics.py: test_fixture_fragmentation_of_a_device_allocator",
        "daemon/test_drills.py: test_each_drill_once_in_random_order_under_load",
    ],
    "6 a memory snapshot has to be asked for before the fault": [
        "daemon/test_drills.py: test_each_drill_once_in_random_order_under_load",
        "telemetry/test_postmortem.py: test_an_incident_becomes_a_bundle_with_ladder_steps_limits_and_requests",
    ],
    "7 aborted requests leak blocks": [
        "engine/test_scheduler_cases.py: test_case_7_requests_aborted_at_any_stage_leave_no_block_and_no_entry_behind",
        "properties/test_state_machine.py: test_promises_hold_for_any_history",
        "real/test_survival.py: test_clients_come_and_go",
        "telemetry/test_leaks.py: test_blocks_without_an_owner_are_suspected_once",
    ],
    "8 host memory grows until the container is killed": [
        "daemon/test_soak.py: test_10000_short_requests_leave_nothing_behind",
        "telemetry/test_leaks.py: test_resident_memory_that_only_grows_is_suspected",
        "telemetry/test_postmortem.py: test_a_moved_counter_makes_it_a_kill_for_memory",
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
    "11 KV memory exists only as a line of the log": [
        "telemetry/test_ladder.py: test_before_the_first_step_the_pool_is_free",
        "telemetry/test_exposition.py: test_a_name_is_registered_before_it_has_an_owner",
    ],
    "12 gauges are removed as internal": [
        "telemetry/test_exposition.py: test_names_types_and_labels_are_the_golden_ones"
    ],
    "13 a metric is missing in one mode": [
        "telemetry/test_exposition.py: test_the_golden_names_are_there_in_every_mode",
        "telemetry/test_exposition.py: test_older_names_are_served_when_asked_for",
    ],
    "14 TTFT is zero, or counts something else than requests": [
        "daemon/test_api_stages.py: test_a_first_token_is_published_once_for_every_choice_that_has_one",
    ],
    "15 a map grew without a metric": [
        "daemon/test_map_sizes.py: test_what_grows_with_requests_has_a_gauge_that_grows_with_it",
        "daemon/test_soak.py: test_10000_short_requests_leave_nothing_behind",
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
    "19 slow at the client, fast on the server's metrics": [
        "daemon/test_stage_sum.py: test_the_stages_of_300_mixed_requests_sum_to_the_handlers_own_stamps",
        "daemon/test_stage_sum.py: test_a_delay_planted_in_one_stage_appears_in_that_stage_alone",
    ],
    "20 preempted and resumed for ever": [
        "engine/test_scheduler_cases.py: test_case_20_a_pool_too_small_for_two_makes_progress_without_a_loop",
    ],
    "21 nobody knows who was preempted": [
        "engine/test_scheduler_cases.py: test_case_21_every_preemption_says_who_lost_what_and_why",
        "daemon/test_cases_served.py: test_case_36_random_prompts_have_no_hits_even_when_they_are_preempted",
        "runbooks/test_provoked.py: test_a_cache_that_is_too_small_is_told_and_the_same_load_with_room_is_none",
        "runbooks/test_case_21.py: test_every_preemption_is_on_record_with_its_request_the_tokens_lost_and_why",
    ],
    "22 spans are lost when a second process exists": [
        "telemetry/test_otlp_daemon.py: test_whole_trees_whatever_becomes_of_a_request",
    ],
    "23 a dead collector stops the server": [
        "telemetry/test_trace.py: test_a_collector_that_is_not_there_costs_only_spans",
        "telemetry/test_trace.py: test_a_missing_part_is_said_in_a_line_and_nothing_else_happens",
        "daemon/test_drills.py: test_each_drill_once_in_random_order_under_load",
    ],
    "24 wedged for hours and healthy": [
        "daemon/test_watchdog.py: test_a_wedge_that_is_released_is_an_incident_and_no_request_is_lost",
        "daemon/test_watchdog.py: test_one_that_is_not_released_is_ended_and_all_its_requests_are_told",
    ],
    "25 a watchdog kills a slow prefill": [
        "daemon/test_watchdog.py: test_a_step_that_is_slow_but_moves_is_left_alone",
    ],
    "26 probes eat engine state": [
        "daemon/test_api_serving.py: "
        "test_500_probes_are_answered_while_the_api_is_saturated_and_no_message_reaches_the_engine",
        "daemon/test_api_serving.py: test_live_startup_and_ready_have_three_meanings",
    ],
    "27 running for hours without a token": [
        "runbooks/test_provoked_memory.py: test_requests_that_run_without_tokens_are_told",
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
    "32 a client makes metric series": ["telemetry/test_series.py: test_ten_thousand_strangers_add_no_series"],
    "33 counters go back when a worker dies": [
        "telemetry/test_series.py: test_counters_never_go_back_and_gauges_end_with_their_engine",
        "telemetry/test_exposition.py: test_a_dead_engine_has_no_kv_and_runs_nothing",
    ],
    "34 a larger limit lowers throughput by a third": [
        "autotune/test_online.py: test_case_34_it_finds_the_knee_explains_and_does_not_oscillate",
        "daemon/test_tuner_live.py: test_it_changes_by_itself_rests_when_frozen_and_remembers_after_a_kill",
    ],
    "35 limits inferred at start differ from the flags, unexplained": [
        "engine/test_budget_plan.py: test_every_resolved_field_has_a_reason",
        "daemon/test_tuning.py: test_it_is_frozen_released_pinned_and_set_over_the_control_route",
    ],
    "36 recomputation counted as hits": [
        "engine/test_scheduler_cases.py: test_case_36_recomputation_is_no_hit",
        "daemon/test_cases_served.py: test_case_36_random_prompts_have_no_hits_even_when_they_are_preempted",
    ],
    "37 no hits, because the shared prefix is too short": [
        "engine/test_scheduler.py: test_a_prefix_shorter_than_a_block_is_called_that",
        "runbooks/test_provoked.py: test_a_shared_beginning_shorter_than_a_block_is_told",
        "runbooks/test_provoked.py: test_a_beginning_of_a_whole_block_hits_and_is_no_finding",
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


def test_no_row_is_left_out() -> None:
    assert {int(case.split()[0]) for case in CASES} == set(range(1, 44))
