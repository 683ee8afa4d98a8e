import random

import pytest

from tidemill.contracts.events import PhaseDone, WeightsCompared
from tidemill.recorders.timing import StepTiming, covered, is_timing, own_seconds


def slow_own_seconds(intervals: list[tuple[str, float, float]], tick: float) -> dict[str, float]:
    """Looks at every tick of the clock."""
    seconds: dict[str, float] = {}
    end = max((end for _, _, end in intervals), default=0.0)
    for i in range(int(end / tick)):
        now = (i + 0.5) * tick
        active = [interval for interval in intervals if interval[1] <= now < interval[2]]
        if active:
            name = max(active, key=lambda interval: interval[1])[0]
            seconds[name] = seconds.get(name, 0.0) + tick
    return seconds


def test_own_seconds_are_those_that_a_slow_clock_counts() -> None:
    dice = random.Random(0)
    for _ in range(50):
        intervals = []
        for k, start in enumerate(dice.sample(range(40), dice.randrange(1, 8))):
            intervals.append((f"p{k % 3}", float(start), float(start + dice.randrange(1, 20))))
        expected = slow_own_seconds(intervals, 1.0)
        assert own_seconds(intervals) == pytest.approx(expected)
        assert covered(intervals) == pytest.approx(sum(expected.values()))


def test_a_phase_within_another_is_not_counted_twice() -> None:
    timing = StepTiming()
    timing.begin(100.0, thread=1)
    timing.add_phase(PhaseDone(name="wake_up", start=100.5, seconds=1.0), 1)
    timing.add_phase(PhaseDone(name="update_weights", start=100.0, seconds=2.0), 1)
    values = timing.end(3.0)
    assert values["time/update_weights"] == 2.0
    assert values["time/wake_up"] == 1.0
    assert values["time/other"] == pytest.approx(1.0)


def test_a_phase_that_began_before_the_step_counts_from_its_start() -> None:
    timing = StepTiming()
    timing.begin(100.0, thread=1)
    timing.add_phase(PhaseDone(name="sleep", start=98.0, seconds=3.0), 1)
    assert timing.end(2.0)["time/other"] == pytest.approx(1.0)


def test_timings_are_told_from_numbers_by_name() -> None:
    assert is_timing({"time/step": 1.0, "memory/device/trainer": 2.0, "weights/verified": 1.0, "engine/reissued": 4.0})
    assert not is_timing({"time/step": 1.0, "reward/mean": 2.0})


def test_the_share_of_weights_that_was_compared_is_the_least_of_the_step() -> None:
    timing = StepTiming()
    timing.begin(0.0, thread=1)
    for compared in (10, 3):
        timing.add_compared(WeightsCompared(owner="engine", compared=compared, total=10))
    assert timing.end(1.0)["weights/verified"] == 0.3
    timing.begin(1.0, thread=1)
    assert "weights/verified" not in timing.end(1.0)
