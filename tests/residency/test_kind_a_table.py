"""Which test shows which fault of kind A (sleep, wake, offload), as reported of other systems, and its right outcome.

A01 a save that runs when the trainer has gone to sleep. A03 a sleep when a process group is gone already. A05 a group
that is used before all ranks are awake. A06 growth with every sleep. A08 use of an engine that slept, or is awake in
part. A09 a save without room for who saves. A11 a wake that runs out of memory. A13 host copies that pile up. A14 a
sleep that frees nothing. A15 a check that counts what others allocate. A17 requests that come while the engine falls
asleep. A18 a recovery that fails half-way.
"""

from pathlib import Path

import pytest
from tests.fault_tables import check_all_listed, check_shown

HERE = "tests/residency"
SHOWN: dict[str, list[str]] = {
    "A01": [
        f"{HERE}/test_museum.py::test_with_leases_the_same_line_is_refused_where_it_stands",
        f"{HERE}/test_museum.py::test_the_save_works_from_the_host_copy_while_the_trainer_sleeps_and_the_engine_answers",
        f"{HERE}/test_kind_a_saves.py::test_a01_every_periodic_save_of_a_trainer_that_sleeps_by_itself_holds_the_weights_"
        "right_after_the_update",
        f"{HERE}/test_kind_a_saves.py::test_a01_after_each_save_the_trainer_goes_to_sleep_while_the_save_may_go_on",
    ],
    "A03": [
        f"{HERE}/test_kind_a_groups.py::test_a03_ranks_whose_groups_somebody_destroyed_sleep_and_wake_and_all_that_are_"
        "used_come_back",
        f"{HERE}/test_groups.py::test_a_group_destroyed_elsewhere_stays_so_and_the_others_keep_their_names",
        f"{HERE}/test_groups.py::test_a_world_destroyed_elsewhere_comes_back_with_the_next_revival",
    ],
    "A05": [
        f"{HERE}/test_kind_a_groups.py::test_a05_wake_returns_when_all_ranks_are_ready_whoever_is_late_and_groups_may_be_"
        "used_at_once",
        f"{HERE}/test_kind_a_groups.py::test_a05_a_trainer_whose_rank_wakes_late_steps_at_once_with_the_right_bits",
    ],
    "A06": [
        f"{HERE}/test_kind_a_groups.py::test_a06_fifty_sleeps_under_a_hook_laid_twice_by_two_copies_of_its_module_leave_"
        "all_counts_flat",
        f"{HERE}/test_groups.py::test_fifty_rounds_leave_groups_threads_files_and_hooks_flat",
        "tests/compat/test_recorded_groups.py::test_installing_twice_wraps_once_and_removing_twice_is_once",
    ],
    "A08": [
        f"{HERE}/test_kind_a_engine.py::test_a08_an_engine_that_slept_generates_nothing_until_all_of_it_is_awake_and_its_"
        "weights_have_come",
        "tests/weights/test_hand_over.py::test_an_engine_woken_without_weights_refuses_to_generate",
    ],
    "A09": [
        f"{HERE}/test_kind_a_saves.py::test_a09_a_save_while_the_engine_is_awake_brings_nothing_to_the_device_and_leaves_"
        "the_engine_as_it_was",
    ],
    "A11": [
        f"{HERE}/test_kind_a_memory.py::test_a11_a_wake_that_fails_at_any_piece_gives_all_back_and_the_next_one_is_exact",
        f"{HERE}/test_kind_a_memory.py::test_a11_an_engine_whose_wake_breaks_off_has_no_room_that_is_half_ready",
        "tests/cluster/test_tenant_proxy.py::test_when_one_of_two_fails_to_wake_the_other_is_put_back_and_the_next_try_"
        "works",
    ],
    "A13": [
        f"{HERE}/test_kind_a_memory.py::test_a13_thirty_rounds_use_one_host_copy_and_resident_bytes_stay_flat",
    ],
    "A14": [
        f"{HERE}/test_kind_a_memory.py::test_a14_an_engine_that_frees_nothing_fails_its_sleep_with_the_reason_and_the_"
        "asker_waits_outside",
        f"{HERE}/test_kind_a_memory.py::test_a14_an_engine_that_frees_too_little_is_no_room_either",
    ],
    "A15": [
        f"{HERE}/test_kind_a_memory.py::test_a15_what_another_thread_allocates_meanwhile_and_keeps_stops_no_sleep",
    ],
    "A17": [
        f"{HERE}/test_kind_a_engine.py::test_a17_requests_in_flight_end_before_the_engine_sleeps_and_those_that_come_"
        "then_are_refused_in_time",
        f"{HERE}/test_kind_a_engine.py::test_a17_requests_that_find_the_device_taken_for_good_are_refused_at_the_deadline",
        f"{HERE}/test_kind_a_engine.py::test_a17_requests_of_two_threads_and_a_sleep_at_once_are_refused_not_queued",
        "tests/cluster/test_engine_proxy.py::test_two_threads_at_once_are_refused_and_so_is_sleep",
    ],
    "A18": [
        f"{HERE}/test_kind_a_recovery.py::test_a18_whichever_step_of_a_recovery_fails_nothing_is_generated_and_the_next_"
        "start_is_as_if_none_had",
    ],
}
FAULTS = ("A01", "A03", "A05", "A06", "A08", "A09", "A11", "A13", "A14", "A15", "A17", "A18")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_kind_a_has_a_test_that_exists_and_says_which_it_shows(fault: str) -> None:
    check_shown(SHOWN, fault)


def test_every_test_that_is_named_after_a_fault_is_in_the_table() -> None:
    files = [path for path in Path(__file__).parent.glob("test_kind_a_*.py") if path.name != Path(__file__).name]
    check_all_listed(SHOWN, FAULTS, files)
