"""Two speeds: `make test` runs some cases of long tests, `make test-all` all of them.

Of a test in `speeds.toml` so many cases run in `make test`, evenly spread over its parameters; the others are marked
`thorough`. All cases of tests that are not in the table run in both.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

QUICK: dict[str, dict[str, int]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Cases that `make test` runs, by file and name of the test."""
QUICK: dict[str, dict[str, int]] = {
    "benchmarks/tests/test_forgetting.py": {
        "test_every_arm_has_its_rows": 0,
    },
    "benchmarks/tests/test_labels.py": {
        "test_arms_label_the_same_tokens_in_one_arena": 0,
    },
    "benchmarks/tests/test_memory.py": {
        "test_a_model_answers_from_each_system_and_from_the_whole_log_under_every_policy": 0,
    },
    "benchmarks/tests/test_recurse.py": {
        "test_every_arm_runs_and_one_that_fails_loses_no_other": 0,
    },
    "benchmarks/tests/test_results_page.py": {
        "test_the_page_is_what_the_kept_runs_give": 0,
    },
    "benchmarks/tests/test_server_load.py": {
        "test_a_short_load_leaves_nothing_behind": 0,
    },
    "benchmarks/tests/test_shards.py": {
        "test_a_limit_leaves_no_process_and_says_how_to_go_on": 0,
        "test_a_process_that_fails_ends_all_and_is_heard": 0,
        "test_a_run_that_is_terminated_leaves_no_process": 0,
        "test_shards_give_the_rows_of_one_process": 0,
    },
    "benchmarks/tests/test_shorten_time.py": {
        "test_the_command_prints_rows": 0,
    },
    "benchmarks/tests/test_stream_perplexity.py": {
        "test_shards_table_keep_page_plot": 0,
    },
    "benchmarks/tests/test_verify.py": {
        "test_a_long_chain_stays_below_its_bound_and_the_full_cache_does_not": 0,
        "test_every_arm_reports_what_checks_cost": 0,
    },
    "tests/attend/kernels/test_hadamard_query.py": {
        "test_queries_are_those_of_the_codec": 4,
    },
    "tests/attend/kernels/test_kernels.py": {
        "test_every_codec": 1,
        "test_every_codec_in_bf16": 1,
        "test_lengths_about_a_tile": 2,
        "test_mass": 1,
        "test_merged_rows": 1,
        "test_odd_shapes_and_mixed_sides": 1,
        "test_slots_of_others_at_the_front_are_skipped": 1,
    },
    "tests/attend/kernels/test_moments.py": {
        "test_a_large_mean_leaves_the_covariance_alone": 1,
        "test_sums_equal_plain_operations": 1,
    },
    "tests/attend/kernels/test_ops.py": {
        "test_operators_load_without_triton_and_tell_its_extra": 0,
    },
    "tests/attend/kernels/test_rope_shift.py": {
        "test_every_row_is_turned_by_each_of_its_shifts": 8,
    },
    "tests/attend/kernels/test_unpack.py": {
        "test_plain_arithmetic_gives_the_codec_s_numbers": 11,
    },
    "tests/attend/test_mass.py": {
        "test_mass_is_the_column_sum": 1,
    },
    "tests/attend/test_paged.py": {
        "test_reading_equals_attention_over_restored_slots": 8,
    },
    "tests/attend/test_quest.py": {
        "test_a_fork_reads_as_a_sequence_that_was_not_forked": 1,
        "test_a_step_reads_the_pages_of_largest_bound": 4,
        "test_summaries_follow_eviction_forks_and_files": 1,
        "test_with_room_for_every_page_it_is_full": 3,
    },
    "tests/attend/test_slot_positions.py": {
        "test_random_gaps": 2,
        "test_shifts_are_found_once_until_slots_change": 0,
    },
    "tests/bench/test_batched_eval.py": {
        "test_a_batch_answers_like_each_job_alone": 0,
    },
    "tests/bench/test_byte_matching.py": {
        "test_bytes_fit_the_budget_and_fill_it_but_for_a_page_per_head": 2,
        "test_the_smallest_share_that_is_named_does_fit": 2,
    },
    "tests/bench/test_diagnostics.py": {
        "test_parts_of_a_batch_without_room_for_all_are_compared_too": 0,
    },
    "tests/bench/test_fidelity.py": {
        "test_every_bit_less_loses_more": 0,
    },
    "tests/bench/test_suite.py": {
        "test_a_run_goes_on_where_it_stopped": 0,
        "test_every_cell_has_a_row": 0,
        "test_shards_make_up_the_run_row_by_row": 0,
        "test_the_full_cache_answers_like_the_model_itself": 0,
    },
    "tests/bench/workloads/test_chat.py": {
        "test_the_fact_is_told_once_at_its_depth": 6,
    },
    "tests/bench/workloads/test_contract.py": {
        "test_a_perfect_reply_scores_one_and_nothing_scores_by_itself": 15,
        "test_prompts_have_the_wanted_length": 9,
        "test_prompts_have_the_wanted_length_for_smollm2": 3,
        "test_samples_depend_on_seed_task_and_index_alone": 3,
    },
    "tests/bench/workloads/test_instruct.py": {
        "test_rules_stand_first_and_the_fact_at_an_even_depth": 1,
    },
    "tests/bench/workloads/test_rag.py": {
        "test_needed_paragraphs_stay_whatever_the_length": 1,
    },
    "tests/bench/workloads/test_retrieval.py": {
        "test_depths_spread_evenly": 1,
    },
    "tests/bench/workloads/test_ruler.py": {
        "test_depths_of_needles_are_even_over_samples": 0,
        "test_questions_come_once_each_and_not_the_impossible_ones": 0,
    },
    "tests/budget/test_contract.py": {
        "test_the_contract_on_any_scores": 1,
    },
    "tests/cli/test_bench.py": {
        "test_ctrl_c_leaves_a_run_and_says_how_to_go_on": 0,
        "test_table_report_and_going_on_after_a_kill": 0,
    },
    "tests/cli/test_chat.py": {
        "test_ctrl_c_stops_the_reply_only": 0,
        "test_memory_is_bounded_however_long_the_talk": 0,
        "test_out_of_pages_exits_with_1": 0,
    },
    "tests/cli/test_demo.py": {
        "test_a_random_model_is_shown_to_fail": 0,
        "test_json": 0,
    },
    "tests/cli/test_fit_prompt.py": {
        "test_a_chat_begins_with_the_prefix_and_keeps_the_talk": 0,
        "test_the_file_is_a_session_that_read_a_system_message": 0,
    },
    "tests/cli/test_label.py": {
        "test_killed_and_interrupted_runs_go_on": 0,
        "test_labels_are_written_and_train_a_scorer": 0,
    },
    "tests/cli/test_main.py": {
        "test_a_closed_pipe_is_quiet": 0,
        "test_ctrl_c_in_a_download": 0,
    },
    "tests/cli/test_new.py": {
        "test_an_installed_package_is_a_term": 0,
    },
    "tests/cli/test_read.py": {
        "test_a_reading_that_was_ended_goes_on": 0,
        "test_an_answer_is_not_lost_where_it_cannot_be_measured": 0,
        "test_control_characters_of_a_text_do_not_reach_the_terminal": 0,
    },
    "tests/cli/test_read_code.py": {
        "test_code_gives_the_best_answer_so_far_with_its_turns": 0,
    },
    "tests/cli/test_serve.py": {
        "test_the_command_serves_until_it_is_interrupted_and_logs_json_alone": 0,
    },
    "tests/cli/test_train_scorer.py": {
        "test_json_tells_the_layers": 0,
    },
    "tests/codec/test_minicache.py": {
        "test_pages_hold_merged_layers": 0,
    },
    "tests/engine/scheduling/test_shared_prefix.py": {
        "test_a_new_prefix_of_jobs_that_come_at_once_is_computed_once": 1,
        "test_if_the_first_ends_the_next_one_computes_the_prefix": 1,
        "test_replies_that_share_and_are_preempted_are_the_same": 0,
    },
    "tests/engine/scheduling/test_scheduler.py": {
        "test_replies_are_those_of_single_runs": 1,
        "test_replies_that_move_to_the_host_are_the_same": 0,
    },
    "tests/engine/test_budget_matrix.py": {
        "test_a_shared_prefill_keeps_what_single_ones_keep": 1,
        "test_every_score_spends_its_size": 2,
    },
    "tests/engine/test_bytes.py": {
        "test_sizes_in_bytes_hold_what_is_observed_too": 2,
        "test_the_reported_peak_is_enough_and_least": 2,
    },
    "tests/engine/test_consecutive_queries.py": {
        "test_drafts_leave_no_queries_behind": 1,
        "test_forks_and_files": 1,
        "test_short_turns_of_a_conversation": 1,
    },
    "tests/engine/test_equivalence.py": {
        "test_any_prefix_hit_is_the_cold_run": 3,
        "test_between_chunks_holds_its_bound": 3,
        "test_every_codec_runs_and_seals_once": 2,
        "test_layer_major_is_one_shot": 2,
        "test_layer_major_is_one_shot_for_every_budget": 2,
        "test_prefix_hit_is_bitwise_the_cold_run": 4,
        "test_ragged_batch_of_policies_is_single_runs": 0,
    },
    "tests/engine/test_fairness.py": {
        "test_a_prompt_that_ends_in_the_middle_leaves_nothing": 1,
        "test_a_short_prompt_does_not_wait_for_a_long_one": 1,
        "test_replies_step_between_the_layers_of_a_prompt": 1,
    },
    "tests/engine/test_faults.py": {
        "test_an_exception_at_any_call_fails_one_job_at_most": 0,
        "test_an_exception_on_the_way_to_the_host_or_back_fails_one_job_at_most": 0,
    },
    "tests/engine/test_fit.py": {
        "test_self_study_asks_what_the_model_answers_to_questions": 0,
    },
    "tests/engine/test_generate.py": {
        "test_an_interrupted_step_or_prompt_leaves_no_trace": 2,
        "test_stop_text_was_never_generated": 2,
    },
    "tests/engine/test_identity.py": {
        "test_any_chunk_length": 3,
        "test_any_page_and_block": 2,
        "test_forks_at_every_stage": 2,
        "test_generating_in_parts": 2,
        "test_pages_are_what_is_read": 2,
        "test_ragged_batch": 2,
        "test_two_extends_are_one": 2,
    },
    "tests/engine/test_replay.py": {
        "test_many_extends_hold_the_size": 1,
        "test_maxima_are_those_of_whole_maps": 3,
        "test_queries_count_by_the_surprise_of_what_they_repeat": 2,
    },
    "tests/engine/test_resumable.py": {
        "test_a_pass_that_is_abandoned_anywhere_leaves_its_sequence_as_it_was": 1,
        "test_two_passes_and_a_reply_take_turns": 2,
    },
    "tests/engine/test_size_bounds.py": {
        "test_layers_whose_slots_differ_in_bytes": 1,
        "test_no_size_is_exceeded": 1,
        "test_what_a_score_always_keeps_is_inside_the_size": 3,
    },
    "tests/engine/test_slot_scores.py": {
        "test_scores_see_the_distances_that_attention_sees": 3,
    },
    "tests/engine/test_speculate.py": {
        "test_a_limit_inside_a_draft": 3,
        "test_a_rejected_draft_leaves_nothing": 2,
        "test_a_stop_string_inside_a_draft": 1,
        "test_an_end_token_inside_a_draft": 2,
        "test_ctrl_c_leaves_the_session_usable": 2,
        "test_every_kind_of_attention": 2,
        "test_greedy_is_the_same_function": 2,
    },
    "tests/evicted/test_recall.py": {
        "test_all_pages_recalled_are_the_full_cache": 2,
        "test_no_score_loses_a_token": 4,
    },
    "tests/memory/test_evaluation.py": {
        "test_a_model_answers_from_what_is_shown": 0,
    },
    "tests/memory/test_recall.py": {
        "test_one_of_ten_thousand_facts_is_found": 0,
    },
    "tests/memory/test_store.py": {
        "test_two_processes_write_at_once": 0,
        "test_whatever_bytes_are_damaged_errors_are_sentences": 6,
    },
    "tests/models/pull/test_pull.py": {
        "test_a_folder_that_is_not_whole_is_made_anew": 0,
        "test_a_killed_pull_is_taken_up_again": 0,
        "test_pull_prints_plain_lines_when_piped_and_nothing_when_told": 0,
        "test_real_models_speak": 0,
        "test_two_processes_pull_once": 0,
    },
    "tests/models/test_attach.py": {
        "test_nothing_is_registered_before_attach": 0,
    },
    "tests/models/test_cache.py": {
        "test_beams": 7,
        "test_second_generate_continues": 6,
    },
    "tests/models/test_fused_layers.py": {
        "test_the_model_says_the_same": 1,
    },
    "tests/pages/kernels/test_compact_write.py": {
        "test_one_launch_writes_what_plain_operations_write": 2,
    },
    "tests/pages/kernels/test_seal.py": {
        "test_one_launch_writes_what_the_plain_seal_writes": 2,
        "test_seals_go_on_where_the_last_one_ended": 1,
    },
    "tests/pages/test_below.py": {
        "test_a_step_reads_what_is_stored": 1,
        "test_slots_come_back_however_long_the_chain": 1,
    },
    "tests/pages/test_bytes.py": {
        "test_bounded_decoding_holds_its_bytes": 1,
    },
    "tests/pages/test_codes.py": {
        "test_codes_never_change": 2,
        "test_forty_rounds_cost_no_more_than_one": 1,
    },
    "tests/pages/test_latents.py": {
        "test_a_step_reads_what_is_stored": 3,
        "test_slots_on_the_axes_come_back": 3,
    },
    "tests/pages/test_out_of_pages.py": {
        "test_a_batch_is_read_as_a_whole_or_not_at_all": 47,
        "test_a_step_without_memory_changes_nothing": 1,
    },
    "tests/passes/captured/test_step.py": {
        "test_steps_agree_with_the_plain_pass_across_seals": 2,
    },
    "tests/policy/test_fingerprint.py": {
        "test_same_in_every_process": 0,
    },
    "tests/recurse/test_locate.py": {
        "test_whatever_is_found_is_inside_of_the_text_and_of_its_quote": 0,
    },
    "tests/recurse/test_real.py": {
        "test_the_answer_is_found_with_its_place": 0,
    },
    "tests/recurse/test_verify.py": {
        "test_a_check_that_asks_the_model_changes_nothing": 0,
        "test_a_long_chain_runs_in_the_memory_of_a_short_one": 0,
        "test_a_refused_attempt_leaves_no_trace": 1,
    },
    "tests/score/test_nacl.py": {
        "test_the_first_of_a_sample_is_drawn_by_softmax": 0,
    },
    "tests/serve/cache/test_source.py": {
        "test_a_hit_is_bitwise_the_cold_request": 2,
    },
    "tests/serve/replicas/test_proxy.py": {
        "test_a_body_that_does_not_come_is_408_in_the_clients_shape": 1,
        "test_a_replica_that_is_killed_costs_no_request_and_comes_back": 0,
        "test_a_request_that_kills_its_replica_is_tried_once_more_and_no_further": 0,
    },
    "tests/serve/replicas/test_replicas.py": {
        "test_a_kill_loses_no_request_and_a_damaged_entry_is_a_miss": 0,
        "test_a_prefix_of_another_replica_is_loaded_from_redis_and_redis_may_go": 0,
        "test_a_replica_that_cannot_start_is_told_once": 0,
        "test_a_stream_ends_in_full_before_the_server_does": 0,
        "test_clients_of_both_vendors_see_one_server": 0,
        "test_no_replica_outlives_its_parent": 0,
        "test_turns_of_a_conversation_are_hits_and_the_dashboard_counts_all": 0,
    },
    "tests/serve/test_ending.py": {
        "test_a_second_signal_ends_it_at_once": 0,
        "test_few_descriptors_and_many_idle_clients_shut_nobody_out_for_long": 0,
        "test_one_that_is_idle_ends_with_0": 0,
        "test_one_that_is_stuck_is_not_waited_for": 0,
        "test_streams_that_nobody_reads_do_not_hold_it": 0,
    },
    "tests/serve/test_fuzz.py": {
        "test_no_request_is_answered_with_a_fault_of_the_servers": 0,
    },
    "tests/serve/test_isolation.py": {
        "test_what_is_forged_is_not_served_where_there_is_a_secret": 1,
    },
    "tests/serve/test_memory.py": {
        "test_cached_prefixes_are_those_of_a_server_without_memory": 1,
    },
    "tests/serve/test_prompt.py": {
        "test_a_real_template_that_writes_tools_behind_the_system_text": 0,
        "test_real_templates_give_the_tokens_they_give_elsewhere": 1,
    },
    "tests/serve/test_prompt_cache.py": {
        "test_what_a_change_leaves_of_tools_system_and_messages": 3,
    },
    "tests/serve/test_real_routers.py": {
        "test_clients_are_served_through_a_router": 0,
        "test_smg_knows_one_key_and_so_one_tenant": 0,
    },
    "tests/serve/test_refusals.py": {
        "test_a_bad_entry_that_cannot_be_deleted_is_a_miss_and_others_are_served": 1,
    },
    "tests/serve/test_restart.py": {
        "test_lives_go_on_over_a_restart": 0,
    },
    "tests/serve/test_same_reply.py": {
        "test_a_conversation_with_a_moving_marker_hits_and_replies_as_cold": 1,
        "test_so_it_does_from_the_device_after_it_gave_way_and_after_a_restart": 1,
    },
    "tests/serve/test_shared_prefix.py": {
        "test_a_prefix_is_computed_once_by_each_tenant": 1,
    },
    "tests/serve/test_slow_clients.py": {
        "test_a_late_request_is_answered_while_the_scheduler_is_stuck": 1,
        "test_a_place_is_free_when_its_job_has_ended_whether_or_not_anybody_reads": 0,
        "test_what_no_route_sees_is_refused_in_the_vendors_shape": 1,
    },
    "tests/shortening/embedders/test_real.py": {
        "test_vectors_are_the_same_in_processes_of_any_number_of_threads": 0,
    },
    "tests/shortening/test_guarantees.py": {
        "test_every_layout_and_script": 14,
        "test_what_must_stay_does_or_the_number_of_its_tokens_is_told": 3,
        "test_spans_of_the_text_in_order_within_one_unit_of_the_size": 3,
    },
    "tests/shortening/test_long_text.py": {
        "test_memory_grows_with_the_text_and_progress_reaches_its_total": 0,
        "test_threads_and_seeds_of_a_process_change_nothing": 0,
    },
    "tests/shortening/test_loaded_model.py": {
        "test_answers_of_a_real_model_are_those_of_transformers": 0,
    },
    "tests/shortening/test_topics.py": {
        "test_topics_stand_in_the_order_of_the_text": 0,
    },
    "tests/shortening/test_words.py": {
        "test_a_real_model_drops_what_it_can_guess": 0,
    },
    "tests/store/entry/encodings/test_encodings.py": {
        "test_a_hit_is_the_same_run_or_near_it": 2,
    },
    "tests/store/entry/test_snapshot.py": {
        "test_a_snapshot_comes_back": 2,
        "test_chunks_that_do_not_fit_are_refused": 2,
        "test_tensors_that_do_not_fit_are_refused": 2,
    },
    "tests/store/test_async_load.py": {
        "test_lookups_are_made_again_until_what_they_found_is_good": 2,
    },
    "tests/store/test_faults.py": {
        "test_flipped_bytes_of_every_kind_are_a_miss": 1,
        "test_flipped_bytes_of_snapshots_are_a_miss": 1,
        "test_truncated_files_are_a_miss": 2,
    },
    "tests/store/test_key.py": {
        "test_keys_are_the_same_in_every_process": 0,
    },
    "tests/store/test_prefixes.py": {
        "test_a_hit_at_a_marker_is_bitwise_a_run_that_stops_there": 2,
        "test_a_snapshot_is_the_sequence_that_was_saved": 2,
        "test_any_whole_chunk_that_agrees_is_reused": 2,
        "test_hit_and_miss_are_bitwise_one_run": 2,
        "test_scopes_are_the_same_in_every_process": 0,
    },
    "tests/store/test_real_store.py": {
        "test_every_tier_gives_the_same_tokens": 0,
    },
    "tests/store/test_refusals.py": {
        "test_a_bad_entry_that_redis_keeps_is_a_miss": 2,
    },
    "tests/store/tiers/test_disk.py": {
        "test_a_kill_loses_at_most_the_entry_being_written": 0,
    },
    "tests/store/tiers/test_shared_disk.py": {
        "test_killed_writers_leave_whole_entries": 0,
    },
    "tests/test_answering.py": {
        "test_a_real_model_answers_from_less_than_a_quarter_of_the_bytes": 0,
    },
    "tests/test_compress.py": {
        "test_generate_goes_on_as_a_session_does": 2,
        "test_turns_on_one_cache_are_those_of_a_session": 1,
    },
    "tests/test_docs.py": {
        "test_the_python_of_pages_runs": 0,
    },
    "tests/test_examples.py": {
        "test_research_reads_checks_and_writes_over_local_files": 0,
    },
    "tests/test_extras.py": {
        "test_the_library_and_its_commands_need_no_extra": 0,
        "test_what_needs_an_extra_names_it": 0,
    },
    "tests/test_imports.py": {
        "test_importing_kvfold_has_no_effect_on_transformers_and_torch": 0,
    },
    "tests/test_linear_patterns.py": {
        "test_patterns_take_linear_time": 1,
        "test_texts_of_one_long_run_are_shortened_in_linear_time": 0,
    },
    "tests/test_plugins.py": {
        "test_a_file_and_a_module_of_the_user_add_terms": 0,
        "test_installed_packages_add_terms_and_workloads": 0,
        "test_what_the_user_names_is_refused_in_one_line": 0,
    },
    "tests/test_real_lookup.py": {
        "test_greedy_tokens_are_the_same": 0,
    },
    "tests/test_real_models.py": {
        "test_bytes_after_a_prompt_of_4000_tokens": 0,
    },
    "tests/test_real_reads.py": {
        "test_pages_chosen_by_channels_answer_as_everything_does": 0,
        "test_tokens_that_the_question_looks_at_go_on": 0,
    },
    "tests/test_real_replay.py": {
        "test_a_needle_is_kept_without_the_question": 0,
    },
    "tests/test_session.py": {
        "test_ask_leaves_the_session_unchanged": 1,
        "test_asking_between_extends_leaves_one_piece": 1,
        "test_forks_are_independent": 1,
        "test_interrupted_extend_leaves_the_session_unchanged": 2,
        "test_stream_is_the_reply_in_pieces": 2,
    },
    "tests/test_session_io.py": {
        "test_headers_and_tensors_that_do_not_fit": 3,
        "test_round_trip_goes_on_token_for_token": 1,
    },
    "tests/test_wheel.py": {
        "test_a_client_of_the_server_is_answered": 0,
        "test_a_program_generates": 0,
        "test_a_scorer_of_the_user_is_compared_with_the_full_cache": 0,
        "test_it_holds_what_the_package_reads_and_says_what_it_is": 0,
    },
    "tests/train/test_bases.py": {
        "test_the_whole_rank_answers_token_for_token": 2,
    },
    "tests/train/test_label_files.py": {
        "test_labels_change_what_is_trained": 0,
    },
    "tests/train/test_labels.py": {
        "test_an_arena_that_holds_few_contexts_is_enough": 0,
        "test_batches_change_nothing": 0,
        "test_labels_under_a_policy_are_those_of_decode_steps": 1,
    },
}


def _key(item: pytest.Item) -> tuple[str, str]:
    file, _, name = item.nodeid.partition("::")
    return file, name.partition("[")[0]


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that only `make test-all` runs."""
    found = list(items)
    total, seen = Counter(map(_key, found)), Counter[tuple[str, str]]()
    for item in found:
        file, name = key = _key(item)
        number, seen[key] = seen[key], seen[key] + 1
        quick = QUICK.get(file, {}).get(name)
        if quick is not None and number * quick % total[key] >= quick:
            item.add_marker(pytest.mark.thorough)
