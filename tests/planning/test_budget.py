"""Budgets of offload modes (`tidemill.planning.budget`)."""

import pytest

from tidemill.errors import ConfigError, ResidencyError
from tidemill.planning.budget import NO_LIMIT, budget_for, check_budget
from tidemill.units import GIB

SIZES = {"trainer_bytes": 8 * GIB, "engine_weight_bytes": 1 * GIB, "engine_bytes": 6 * GIB}


def test_always_leaves_room_for_the_hand_over_alone() -> None:
    budget, sentence = budget_for("always", **SIZES, device_bytes=80 * GIB)
    assert budget == 9 * GIB
    assert "9.0 GiB" in sentence and "take turns" in sentence


def test_always_leaves_room_for_an_engine_larger_than_the_trainer() -> None:
    sizes = SIZES | {"engine_bytes": 30 * GIB}
    assert budget_for("always", **sizes, device_bytes=80 * GIB)[0] == 30 * GIB


def test_never_has_no_limit() -> None:
    assert budget_for("never", **SIZES, device_bytes=1)[0] == NO_LIMIT


@pytest.mark.parametrize(("device", "outcome"), [(80 * GIB, "both stay awake"), (12 * GIB, "they take turns")])
def test_auto_takes_most_of_the_device_and_says_what_follows(device: int, outcome: str) -> None:
    budget, sentence = budget_for("auto", **SIZES, device_bytes=device)
    assert budget == int(0.9 * device)
    assert outcome in sentence


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ResidencyError, match="sometimes"):
        budget_for("sometimes", **SIZES, device_bytes=1)


def test_a_budget_without_room_for_the_largest_moment_is_refused() -> None:
    check_budget(9 * GIB, **SIZES)
    with pytest.raises(ConfigError, match=r"within 8.0 GiB: 9.0 GiB must be awake .* raise residency.budget"):
        check_budget(8 * GIB, **SIZES)
    with pytest.raises(ConfigError, match="engine 30.0 GiB"):
        check_budget(20 * GIB, **SIZES | {"engine_bytes": 30 * GIB})


def test_sizes_that_round_alike_are_told_in_bytes() -> None:
    with pytest.raises(ConfigError, match="within 9663676415 B: 9663676416 B must be awake"):
        check_budget(9 * GIB - 1, **SIZES)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_budget_of_a_mode_has_room(mode: str) -> None:
    check_budget(budget_for(mode, **SIZES, device_bytes=1)[0], **SIZES)
