"""tidemill.trainers.common.schedule"""

from dataclasses import replace

import pytest

from tidemill.trainers.common.schedule import PhaseSettings, ScheduleKind, learning_rate

SETTINGS = PhaseSettings(
    lr=1.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=10,
)


def curve(settings: PhaseSettings, updates: int = 12) -> list[float]:
    return [learning_rate(settings, update) for update in range(updates)]


def test_a_warm_up_rises_in_equal_steps_and_starts_above_zero() -> None:
    found = curve(replace(SETTINGS, warm_up_steps=4), 6)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_decay_ends_at_its_floor_and_stays_there() -> None:
    found = curve(replace(SETTINGS, schedule="linear", warm_up_steps=2, min_ratio=0.2))
    assert found[:4] == pytest.approx([0.5, 1.0, 1.0, 0.9])
    assert found[9] == pytest.approx(0.3)
    assert found[10:] == pytest.approx([0.2, 0.2])


def test_a_cosine_decay_is_half_way_down_in_the_middle() -> None:
    found = curve(replace(SETTINGS, schedule="cosine"))
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[10:] == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_no_update_within_the_run_has_rate_zero(kind: ScheduleKind) -> None:
    assert min(curve(replace(SETTINGS, schedule=kind, warm_up_steps=3), 10)) > 0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warm_up", [10, 25])
def test_a_warm_up_as_long_as_the_run_or_longer_is_all_warm_up(kind: ScheduleKind, warm_up: int) -> None:
    found = curve(replace(SETTINGS, schedule=kind, warm_up_steps=warm_up), 10)
    assert found == pytest.approx([(update + 1) / warm_up for update in range(10)])


def test_the_rate_of_an_update_does_not_depend_on_how_it_was_reached() -> None:
    settings = replace(SETTINGS, schedule="cosine", warm_up_steps=3)
    assert [learning_rate(settings, update) for update in range(4, 10)] == curve(settings)[4:10]
