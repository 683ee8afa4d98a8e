from pathlib import Path

import pytest
from tests.recorders.synthetic_run import write_run
from tests.recorders.written import WrittenAtOnce

from tidemill.contracts.events import Memory, PhaseDone
from tidemill.recorders.page.moments import moments
from tidemill.recorders.page.source import select_lines


def test_the_stack_of_a_step_is_as_high_as_the_step_is_long(tmp_path: Path) -> None:
    write_run(tmp_path, steps=40, warm_up=5)
    stack = moments(tmp_path, 40)["stack"]
    steps = {line["step"]: line["time/step"] for line in select_lines(tmp_path / "metrics.jsonl", {"timing": None})}
    for i, step in enumerate(stack["steps"]):
        assert sum(row[i] for row in stack["seconds"]) == pytest.approx(steps[step], rel=1e-3)
    assert stack["names"][-1] == "other" and "save_durable" not in stack["names"]


def test_of_a_long_run_few_steps_are_stacked_and_the_first_and_last_can_be_looked_into(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for step in range(2000):
        sink.write(step, PhaseDone(name="step", start=float(step), seconds=1.0))
    found = moments(tmp_path, 2000)
    assert len(found["stack"]["steps"]) <= 300 and found["stack"]["stride"] == 7
    shown = [step for step, *_ in found["detail"]["steps"]]
    assert len(shown) == 800 and shown[0] == 0 and shown[-1] == 1999


def test_a_night_between_two_starts_does_not_fill_the_picture(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for step, start in enumerate((100.0, 101.0, 40_000.0, 40_001.0)):
        sink.write(step, PhaseDone(name="train", start=start + 0.25, seconds=0.5, owner="trainer"))
        sink.write(step, Memory(time=start + 0.5, what="x", device={"trainer": 5}, host={}, budget=9))
        sink.write(step, PhaseDone(name="step", start=start, seconds=1.0))
    detail = moments(tmp_path, 4)["detail"]
    assert [begin for _, begin, _, _ in detail["steps"]] == [0.0, 1.0, 2.25, 3.25]
    assert [span[2] for span in detail["spans"]] == [0.25, 1.25, 2.5, 3.5]
    assert [level[0] for level in detail["levels"]] == [0.5, 1.5, 2.75, 3.75]
    assert [round(at) for *_, at in detail["steps"]] == [100, 101, 40_000, 40_001]


def test_owners_are_in_one_order_and_who_is_not_named_holds_nothing(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    sink.write(0, PhaseDone(name="step", start=0.5, seconds=2.0))
    sink.write(0, Memory(time=1.0, what="a", device={"critic": 3, "engine": 2}, host={}, budget=9))
    sink.write(0, Memory(time=2.0, what="b", device={"trainer": 1}, host={"engine": 2}, budget=9))
    detail = moments(tmp_path, 1)["detail"]
    assert detail["owners"] == ["trainer", "engine", "critic"]
    assert [level[2:4] for level in detail["levels"]] == [[[0, 2, 3], [0, 0, 0]], [[1, 0, 0], [0, 2, 0]]]


def test_a_step_under_way_ends_at_its_last_phase(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    sink.write(0, PhaseDone(name="sleep", start=10.0, seconds=1.0))
    sink.write(0, PhaseDone(name="generate", start=11.0, seconds=2.0))
    found = moments(tmp_path, 0)
    assert found["stack"]["steps"] == []
    assert found["detail"]["steps"] == [[0, 0.0, 3.0, 10]]
