"""Budgets of offload modes (`tidemill.residency.plan`)."""

import pytest

from tidemill.errors import ResidencyError
from tidemill.residency.plan import NO_LIMIT, budget_for
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
