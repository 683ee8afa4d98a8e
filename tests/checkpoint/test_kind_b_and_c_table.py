"""The faults of kinds B and C, checkpoints and resume, and the tests that show that they cannot happen here.

A row lists what shows it. Of C14 there is no buffer of rollouts yet, of B10 no adapter and no value head; what is there
instead is shown.
"""

from pathlib import Path

import pytest
from tests.fault_tables import check_all_listed, check_shown

HERE, WHOLE = "tests/checkpoint", "tests/e2e"
SHOWN: dict[str, list[str]] = {
    "B01": [
        f"{HERE}/test_kind_b_saves.py::test_b01_a_save_cut_short_before_any_of_its_files_is_never_taken_under_either_name",
        f"{HERE}/test_layouts.py::test_b01_whichever_file_of_the_newest_is_harmed_it_is_named_and_the_next_older_is_taken",
        f"{HERE}/test_layouts.py::test_b01_c11_every_start_on_a_tree_says_what_it_takes_and_goes_on_from_it_and_nothing_"
        "whole_is_lost",
        "tests/crash/test_kill_processes.py::test_a_run_killed_at_a_named_point_ends_as_one_never_killed",
        "tests/crash/test_kill_processes.py::test_a_run_killed_at_thirty_random_moments_ends_bit_for_bit_as_one_never_"
        "killed",
    ],
    "B04": [
        f"{HERE}/test_kind_b_saves.py::test_b04_at_every_moment_of_five_saves_of_which_one_is_kept_a_whole_one_is_there",
    ],
    "B05": [
        f"{WHOLE}/test_failures_of_saves_on_disk.py::test_b05_an_old_checkpoint_that_somebody_holds_is_warned_of_stays_"
        "and_goes_when_it_can",
    ],
    "B06": [
        f"{WHOLE}/test_failures_of_saves.py::test_b06_a_disk_slower_than_the_steps_makes_them_wait_tells_how_long_and_"
        "keeps_the_order",
    ],
    "B08": [
        f"{WHOLE}/test_failures_of_saves_on_disk.py::test_b08_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_the_"
        "older_ones_and_the_next_start_ends_equal",
        f"{WHOLE}/test_failures_of_saves_on_disk.py::test_b08_a_run_that_may_go_on_with_a_full_disk_says_so_and_saves_"
        "when_there_is_room_again",
        f"{WHOLE}/test_failures_of_saves_on_disk.py::test_room_is_looked_for_beforehand_and_the_message_says_how_much_is_"
        "needed",
    ],
    "B09": [
        f"{HERE}/test_kind_b_saves.py::test_b09_of_ten_saves_of_two_ranks_one_process_publishes_and_the_late_rank_is_"
        "waited_for",
    ],
    "B10": [
        f"{HERE}/test_kind_b_exports.py::test_b10_an_export_has_tied_weights_once_and_loads_with_every_key_and_the_"
        "trainers_values",
    ],
    "B12": [
        f"{HERE}/test_kind_b_exports.py::test_b12_a_run_that_learns_nothing_exports_the_base_bit_by_bit",
    ],
    "B13": [
        f"{HERE}/test_kind_b_exports.py::test_b13_an_export_is_in_the_bases_precision_or_in_the_one_asked_for_and_its_"
        "config_says_so",
    ],
    "B14": [
        f"{HERE}/test_kind_b_exports.py::test_b14_a_base_whose_generation_settings_contradict_each_other_costs_no_state_"
        "and_is_warned_of",
    ],
    "B16": [
        f"{WHOLE}/test_failures_of_saves_on_disk.py::test_b16_a_folder_that_is_read_only_is_found_before_the_first_step_"
        "and_names_itself",
        f"{WHOLE}/test_failures_of_saves.py::test_b16_a_folder_whose_checkpoints_cannot_be_written_is_refused_before_the_"
        "first_step",
    ],
    "B17": [
        f"{HERE}/test_resume_equality.py::test_b17_generations_that_each_resume_and_save_equal_a_run_that_was_never_"
        "stopped",
    ],
    "B19": [
        f"{HERE}/test_kind_b_saves.py::test_b19_a_save_of_every_format_that_a_release_wrote_is_loaded_by_this_one",
        f"{HERE}/test_kind_b_saves.py::test_b19_a_save_of_a_format_to_come_says_which_release_reads_it_and_nothing_older_"
        "is_taken",
    ],
    "C02": [
        f"{HERE}/test_kind_c_data.py::test_c02_a_run_saved_where_an_epoch_ends_goes_on_with_the_next_and_does_all_its_"
        "steps",
    ],
    "C03": [
        f"{HERE}/test_kind_c_data.py::test_c03_a_run_saved_in_its_second_epoch_is_in_it_after_the_resume_under_the_same_"
        "shuffle",
    ],
    "C05": [
        f"{HERE}/test_kind_c_data.py::test_c05_no_prompt_of_the_steps_before_the_save_comes_again_in_its_epoch",
        f"{HERE}/test_resume_equality.py::test_c05_a_run_that_died_steps_after_its_checkpoint_makes_them_again_with_the_"
        "same_ids_and_tokens",
    ],
    "C08": [
        f"{HERE}/test_kind_c_restores.py::test_c08_each_load_in_one_process_reads_the_step_that_it_was_told",
        f"{HERE}/test_kind_c_restores.py::test_c08_steps_of_a_run_are_exported_by_their_number_in_any_order",
    ],
    "C09": [
        f"{HERE}/test_kind_c_restores.py::test_c09_moments_and_counts_go_on_over_a_resume_and_a_checkpoint_without_them_"
        "is_refused",
        f"{HERE}/test_kind_c_restores.py::test_c09_a_fresh_optimizer_is_asked_for_by_name_and_told_of",
    ],
    "C10": [
        f"{HERE}/test_kind_c_data.py::test_c10_a_schedule_goes_over_a_resume_as_over_any_step_and_another_total_is_told_"
        "and_followed",
    ],
    "C11": [
        f"{HERE}/test_layouts.py::test_c11_the_newest_of_a_tree_is_what_the_table_wants",
        f"{HERE}/test_layouts.py::test_b01_c11_every_start_on_a_tree_says_what_it_takes_and_goes_on_from_it_and_nothing_"
        "whole_is_lost",
    ],
    "C12": [
        f"{HERE}/test_layouts.py::test_c12_a_save_without_one_of_the_parts_is_not_taken_whichever_it_is",
    ],
    "C14": [
        f"{HERE}/test_kind_c_data.py::test_c14_what_was_rolled_out_after_the_save_is_made_anew_by_the_policy_that_learns_"
        "from_it",
    ],
    "C15": [
        f"{HERE}/test_kind_c_restores.py::test_c15_a_crash_and_a_resume_are_one_run_of_the_tracker_whose_steps_come_once_"
        "or_with_a_mark",
    ],
    "C16": [
        f"{HERE}/test_resharding.py::test_c16_what_every_layout_saved_this_one_loads_and_gathers_to_the_same_bits",
        "tests/crash/test_kill_ranks.py::test_a_run_saved_by_two_ranks_is_resumed_by_one_and_by_four",
    ],
    "C17": [
        f"{HERE}/test_kind_c_data.py::test_c17_an_epoch_that_no_number_of_steps_divides_loses_no_prompt_wherever_it_is_"
        "saved",
    ],
    "C18": [
        f"{HERE}/test_kind_c_restores.py::test_c18_a_total_at_or_below_what_is_done_does_no_step_and_a_greater_one_goes_"
        "on",
        f"{HERE}/test_kind_c_restores.py::test_c18_a_start_from_saved_weights_alone_is_another_run_at_step_0_with_a_"
        "fresh_optimizer",
    ],
    "C20": [
        f"{HERE}/test_resume_equality.py::test_c20_two_runs_continued_from_one_checkpoint_are_equal_and_equal_to_the_"
        "uninterrupted_one",
    ],
}
KIND_B = (1, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 19)
KIND_C = (2, 3, 5, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18, 20)
FAULTS = (*(f"B{number:02d}" for number in KIND_B), *(f"C{number:02d}" for number in KIND_C))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_kinds_b_and_c_has_a_test_that_exists_and_says_which_it_shows(fault: str) -> None:
    check_shown(SHOWN, fault)


def test_every_test_that_is_named_after_a_fault_is_in_the_table() -> None:
    files = [path for path in Path(__file__).parent.glob("test_kind_[bc]_*.py") if path.name != Path(__file__).name]
    check_all_listed(SHOWN, FAULTS, files)
