"""tidemill.recorders.recorded: a number read back from metrics.jsonl."""

from pathlib import Path

import pytest

from tidemill.contracts.events import Evaluated, Metrics
from tidemill.recorders.jsonl import JsonlSink
from tidemill.recorders.recorded import RecordedNumber


@pytest.fixture
def sink(tmp_path: Path) -> JsonlSink:
    made = JsonlSink(run=tmp_path)
    made.resume(0, {})
    return made


def number(folder: Path, name: str) -> RecordedNumber:
    return RecordedNumber(folder / "metrics.jsonl", name)


def test_a_number_is_read_back_by_step_and_what_is_no_number_never_counts(sink: JsonlSink, tmp_path: Path) -> None:
    for step, value in enumerate([0.5, float("nan"), float("inf"), 2]):
        sink.write(step, Metrics(values={"reward/mean": value, "policy/loss": 1.0}))
        sink.write(step, Evaluated(values={"eval/reward": step / 10}))
    sink.write(4, Metrics(values={"policy/loss": 1.0}))
    sink.flush()
    assert number(tmp_path, "reward/mean").values() == {0: 0.5, 3: 2.0}
    assert number(tmp_path, "eval/reward").values() == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3}
    assert number(tmp_path, "reward").values() == {}
    assert number(tmp_path, "step").values() == {}
    assert number(tmp_path, "reward").names() == ["eval/reward", "policy/loss", "reward/mean"]


def test_a_file_that_grows_or_is_cut_is_followed(sink: JsonlSink, tmp_path: Path) -> None:
    found = number(tmp_path, "reward/mean")
    assert found.values() == {} and found.names() == []
    for step in range(3):
        sink.write(step, Metrics(values={"reward/mean": float(step)}))
        sink.flush()
        assert found.values() == {past: float(past) for past in range(step + 1)}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"metrics","step":3,"reward/mean":7')  # a process died over this line
    assert 3 not in found.values()
    sink.resume(1, {})
    sink.write(1, Metrics(values={"reward/mean": 9.0}))
    sink.flush()
    assert found.values() == {0: 0.0, 1: 9.0}
    (tmp_path / "metrics.jsonl").unlink()
    assert found.values() == {}


def test_lines_that_another_program_wrote_do_no_harm(tmp_path: Path) -> None:
    lines = ["[1]", "{", '{"step":"x","a":1}', '{"step":1,"a":true}', '{"step":2,"a":1' + "0" * 400 + "}", '{"a":1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step":3,"a":1}', '{"step":3,"a":null}', ""]))
    assert number(tmp_path, "a").values() == {}
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert number(tmp_path, "a").values() == {}
