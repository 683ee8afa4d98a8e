"""I1 to I12 in a whole run: real savers, leases and checkpoints of two ranks, on a disk that loses what was not synced.

By Hypothesis's rules and by weighted random walks, both; LIFE_CYCLES=20 in the environment makes twenty times as
many of each. A walk that fails is `walk(seed)`.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.residency.life_cycle_moves import RunMachine, walk

pytestmark = [
    # A writer whose disk has no power any more ends by PowerCut, as a killed one ends.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.slow,
    pytest.mark.timeout(0 if "LIFE_CYCLES" in os.environ else 300),
]
TIMES = int(os.environ.get("LIFE_CYCLES", "1"))
WALKS = 30


def test_the_invariants_hold_in_what_hypothesis_finds() -> None:
    run_state_machine_as_test(
        RunMachine,
        settings=settings(
            max_examples=90 * TIMES,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("first", range(0, 4 * WALKS * TIMES, WALKS))
def test_the_invariants_hold_in_random_walks(first: int) -> None:
    for seed in range(first, first + WALKS):
        walk(seed)
