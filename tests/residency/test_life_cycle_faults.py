"""The harness of the life cycle is tested: eleven faults, each in the real code, must be caught.

Caught after so many walks, and after so many of Hypothesis's examples (with 6.170), the last of which is its replay:

    free_on_wake          2   4  I2, I3
    overwrite_referenced  9  49  I3
    unmap_before_d2h      1   4  I1
    lazy_not_in_ledger    1   2  I4
    overwrite_in_place    1   4  I10, I12
    missing_rank          1   4  I9
    no_data_fsync         1   4  I10
    no_manifest_fsync     1   4  I10
    no_dir_fsync          2   4  I10
    retention_early       4   -  I10
    leak_refs             1   4  I5

Early retention is missed by Hypothesis, as it was in the model, and the overwritten page is found late: walks
are needed too, whose weights lead to what is rare.
"""

import contextlib
import io
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.crash.point_names import skip_names
from tests.residency.life_cycle_faults import FAULTS
from tests.residency.life_cycle_moves import RunMachine, walk

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
WALKS = 60
EXAMPLES = 60
ONLY_WALKS = {"overwrite_referenced", "retention_early"}


def by_walks(name: str) -> tuple[int, str]:
    """After how many walks it is caught, and as what."""
    for seed in range(WALKS):
        try:
            walk(seed, FAULTS[name])
        except AssertionError as error:
            return seed + 1, str(error).splitlines()[0]
    return WALKS, "missed"


def by_rules(name: str) -> tuple[int, str]:
    """After how many examples it is caught, and as what."""

    class Machine(RunMachine):
        fault = FAULTS[name]
        examples = 0

    how = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        print_blob=False,
        report_multiple_bugs=False,
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_state_machine_as_test(Machine, settings=how)
    except AssertionError as error:
        return Machine.examples, str(error).splitlines()[0]
    return Machine.examples, "missed"


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_caught_by_random_walks(name: str, record_property: Callable[[str, object], None]) -> None:
    count, text = by_walks(name)
    record_property("walks", count)
    assert text.split()[0] in FAULTS[name].breaks.split("|"), f"{name} after {count} walks: {text}"


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ONLY_WALKS])
def test_each_fault_but_two_is_caught_by_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    count, text = by_rules(name)
    record_property("examples", count)
    assert text.split()[0] in FAULTS[name].breaks.split("|"), f"{name} after {count} examples: {text}"


def test_every_step_that_can_be_left_out_is_left_out_by_one_of_them() -> None:
    left_out = {word.partition("=")[0] for fault in FAULTS.values() for word in fault.skips.split(",") if word}
    assert skip_names() <= left_out
