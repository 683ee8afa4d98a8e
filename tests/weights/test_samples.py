"""tidemill.weights.samples, tidemill.weights.verifying: what is compared when, and told of it."""

import pytest

from tidemill.contracts.events import Event, PhaseDone, WeightsCompared
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.weights.samples import WeightsInTurn, every_weight, no_weight
from tidemill.weights.verifying import Verifier

NAMES = [f"layer.{number}" for number in range(23)]


def test_both_sides_choose_the_same_weights_whatever_their_order() -> None:
    for part in range(5):
        assert Sample(part=part, of=5).chosen(NAMES) == Sample(part=part, of=5).chosen(reversed(NAMES))
    assert EVERY_WEIGHT.chosen(NAMES) == set(NAMES)
    assert not Sample(of=0).chosen(NAMES)


@pytest.mark.parametrize("within", [2, 8, 23, 50])
def test_every_weight_has_its_turn_once_within_so_many_hand_overs_from_any_step(within: int) -> None:
    in_turn = WeightsInTurn(within=within)
    for first in (0, 5):
        turns = [in_turn(PolicyVersion(1, first + step)).chosen(NAMES) for step in range(within)]
        assert sorted(name for turn in turns for name in turn) == sorted(NAMES)
    assert in_turn(PolicyVersion(1, 4)) == in_turn(PolicyVersion(2, 4))


def test_all_or_none_is_the_same_each_time() -> None:
    assert every_weight(PolicyVersion(1, 3)) == EVERY_WEIGHT
    assert no_weight(PolicyVersion(1, 3)).of == 0


def test_the_first_hand_over_and_the_one_after_a_failure_are_compared_whole() -> None:
    events: list[Event] = []
    verifier = Verifier(samples=WeightsInTurn(within=4), words=True, emit=events.append)
    seen = []
    for step, succeeds in enumerate([True, True, False, True, True]):
        sample = verifier.begin(PolicyVersion(1, step))
        assert sample.words
        seen.append(sample.of)
        if succeeds:
            verifier.passed("engine", compared=2, total=8)
    assert seen == [1, 4, 4, 1, 4]
    assert events == [WeightsCompared(owner="engine", compared=2, total=8)] * 4


def test_where_nothing_is_compared_the_first_is_no_exception() -> None:
    verifier = Verifier(samples=no_weight, words=False, emit=[].append)
    assert verifier.begin(PolicyVersion(1, 0)).of == 0


def test_the_time_of_comparing_is_told_with_what_was_spent_before_and_after_failures_too() -> None:
    events: list[Event] = []
    verifier = Verifier(samples=every_weight, words=False, emit=events.append)
    with pytest.raises(OSError), verifier.timed("engine", before=5.0):
        raise OSError
    (done,) = events
    assert isinstance(done, PhaseDone)
    assert (done.name, done.owner) == ("verify", "engine")
    assert 5.0 <= done.seconds < 6.0
