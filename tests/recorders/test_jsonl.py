import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.recorders.written import WrittenAtOnce

from tidemill.contracts.events import CheckpointEvent, Evaluated, Metrics, Notice, PhaseDone, RolloutDone
from tidemill.recorders.jsonl import JsonlSink, extremes, finite
from tidemill.testing.suites.recorder import HOSTILE, SinkSuite, every_event, scored_group

ODD = (Path(__file__).parents[1] / "data" / "prompts_odd_unicode.jsonl").read_bytes().splitlines()


def read(path: Path) -> list[dict[str, Any]]:
    """Strict: every line is whole, ASCII and free of bare NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name}")

    data = path.read_bytes()
    assert data.isascii() and (not data or data.endswith(b"\n"))
    return [json.loads(line, parse_constant=refuse) for line in data.split(b"\n")[:-1]]


class TestJsonlSink(SinkSuite):
    def make(self, run: Path) -> JsonlSink:
        return WrittenAtOnce(run=run)


def test_every_kind_of_line_starts_with_kind_and_step(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for event in every_event(HOSTILE):
        sink.write(3, event)
    kinds = {}
    for name in ("metrics", "events", "samples"):
        lines = read(tmp_path / f"{name}.jsonl")
        assert all(list(line)[:2] == ["kind", "step"] and line["step"] == 3 for line in lines)
        kinds[name] = {line["kind"] for line in lines}
    assert kinds == {
        "metrics": {"metrics", "timing", "eval"},
        "events": {"phase", "memory", "transition", "checkpoint", "notice"},
        "samples": {"train", "apart"},
    }


def test_numbers_that_are_none_are_null_and_counted(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    values = {"a": float("nan"), "b": float("-inf"), "c": np.float32(0.5), "d": np.float32("nan"), "e": 2}
    sink.write(0, Metrics(values=values))
    sink.write(0, Metrics(values={"a": 1.0}))
    bad, good = read(tmp_path / "metrics.jsonl")
    assert bad == {"kind": "metrics", "step": 0, "a": None, "b": None, "c": 0.5, "d": None, "e": 2, "nonfinite": 3}
    assert "nonfinite" not in good


def test_resuming_keeps_exactly_what_came_before_the_step(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for step in range(6):
        sink.write(step, Evaluated(values={"eval/reward": step / 10}))
        sink.write(step, Metrics(values={"reward/mean": step / 10}))
        sink.write(step, PhaseDone(name="train", start=1.0, seconds=1.0))
        sink.write(step, RolloutDone(kind="train", groups=[scored_group(str(step), (1.0,))]))
        sink.write(step, Metrics(values={"time/step": 1.0}))
    sink.close()
    for name in ("metrics", "events", "samples"):
        with (tmp_path / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"kind":"metrics","step":2,"torn')
    again = WrittenAtOnce(run=tmp_path)
    again.resume(3, {})
    again.write(3, Metrics(values={"reward/mean": 9.0}))
    again.close()
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "metrics"] == [0, 1, 2, 3]
    assert lines[-1]["reward/mean"] == 9.0
    assert [line["step"] for line in lines if line["kind"] in ("eval", "timing")] == [0, 0, 1, 1, 2, 2]
    assert [line["step"] for line in read(tmp_path / "events.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in read(tmp_path / "samples.jsonl")] == [0, 1, 2]


def test_what_became_of_a_checkpoint_is_known_after_resuming_from_it(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for step, status, stamped in ((3, "staged", 2), (3, "durable", 4), (5, "staged", 4)):
        sink.write(stamped, CheckpointEvent(time=0.0, status=status, step=step, path="p"))
    sink.close()
    WrittenAtOnce(run=tmp_path).resume(3, {})
    kept = [(line["checkpoint_step"], line["status"]) for line in read(tmp_path / "events.jsonl")]
    assert kept == [(3, "staged"), (3, "durable")]


def test_a_fresh_start_forgets_a_run_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    first = WrittenAtOnce(run=tmp_path)
    first.resume(0, {})
    for event in every_event("x"):
        first.write(0, event)
    WrittenAtOnce(run=tmp_path).resume(0, {})
    assert all((tmp_path / name).read_bytes() == b"" for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl"))


def test_lines_are_in_their_file_when_the_sink_is_flushed(tmp_path: Path) -> None:
    sink = JsonlSink(run=tmp_path)
    sink.resume(0, {})
    sink.write(0, Notice(text="hello", details={"path": tmp_path, "set": {1}}))
    sink.flush()
    assert read(tmp_path / "events.jsonl")[0]["text"] == "hello"


def test_some_groups_and_the_best_and_worst_of_their_answers_are_kept(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path, groups=2, answers=2)
    sink.resume(0, {})
    groups = [scored_group(f"q{i}", (0.3, 0.9, None, 0.1, 0.5)) for i in range(5)]
    sink.write(0, RolloutDone(kind="eval", groups=groups))
    lines = read(tmp_path / "samples.jsonl")
    assert [(line["prompt"], line["sample"]) for line in lines] == [("q0", 1), ("q0", 2), ("q1", 1), ("q1", 2)]
    assert [(line["reward"], line["status"]) for line in lines[:2]] == [(0.9, "scored"), (None, "abstained")]


def test_best_and_worst_are_those_that_sorting_finds() -> None:
    dice = random.Random(0)
    for size in range(1, 9):
        rewards = tuple(dice.random() for _ in range(size))
        kept = {answer.reward for answer in extremes(scored_group("q", rewards).trajectories, 2)}
        assert kept == {min(rewards), max(rewards)}
        assert len(extremes(scored_group("q", rewards).trajectories, 99)) == size


def test_long_answers_are_cut_on_the_page_not_in_the_middle_of_a_line(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path, max_characters=100)
    sink.resume(0, {})
    sink.write(0, RolloutDone(kind="train", groups=[scored_group("x" * 10_000, (1.0, 0.0))]))
    assert (tmp_path / "samples.jsonl").stat().st_size < 3000


@pytest.mark.parametrize("line", ODD)
def test_unusual_text_comes_back_as_it_was(line: bytes, tmp_path: Path) -> None:
    text = json.loads(line)["prompt"]
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    sink.write(0, RolloutDone(kind="train", groups=[scored_group(text, (1.0,))]))
    assert read(tmp_path / "samples.jsonl")[0]["prompt"] == text


def test_finite_goes_into_tables_and_lists() -> None:
    assert finite({"a": [1.0, float("nan"), {"b": float("inf")}], 2: "x"}) == (
        {"a": [1.0, None, {"b": None}], "2": "x"},
        2,
    )


def test_a_line_about_a_checkpoint_that_does_not_say_which_goes(tmp_path: Path) -> None:
    whole = b'{"kind":"checkpoint","step":3,"checkpoint_step":2}\n'
    garbled = b'{"kind":"checkpoint","step":1}\n{"kind":"checkpoint","step":1,"checkpoint_step":"x"}\n'
    (tmp_path / "events.jsonl").write_bytes(garbled + whole)
    WrittenAtOnce(run=tmp_path).resume(2, {})
    assert (tmp_path / "events.jsonl").read_bytes() == whole


def test_the_names_of_the_files_survive_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    sink = WrittenAtOnce(run=tmp_path / "run")
    sink.resume(0, {})
    assert synced == [tmp_path, tmp_path / "run"]
    assert len(list((tmp_path / "run").iterdir())) == 3
    sink.close()
