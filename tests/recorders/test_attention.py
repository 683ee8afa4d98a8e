"""What a quiet run still says (`tidemill.recorders.attention`)."""

import io
from pathlib import Path

import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.cli.main import main
from tidemill.contracts.events import CheckpointEvent, Metrics, Notice, Progress
from tidemill.recorders.attention import AttentionSink


def test_warnings_and_failed_saves_are_shown_and_nothing_else() -> None:
    stream = io.StringIO()
    sink = AttentionSink(stream)
    sink.resume(3, {})
    for event in (
        Notice(text="all is well"),
        Metrics(values={"reward/mean": 1.0}),
        Progress(what="saving", done=1, total=2),
        CheckpointEvent(time=0.0, status="durable", step=3, path="x"),
        Notice(text="step-1 is not whole\x1b[31m", level="warning"),
        CheckpointEvent(time=0.0, status="failed", step=3, path="", reason="the disk is full"),
    ):
        sink.write(3, event)
    sink.flush()
    sink.end_step(3)
    sink.close()
    first, second = stream.getvalue().splitlines()
    assert first == r"warning: step-1 is not whole\x1b[31m"
    assert second.startswith("warning: ") and "the disk is full" in second
    assert sink.state() == {}


def test_a_quiet_run_is_silent_but_for_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path)
    capsys.readouterr()
    assert main(["run", str(recipe(tmp_path, tmp_path / "run")), "--quiet", "checkpoint.keep_best=nope"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told and all(line.startswith("warning: ") for line in told)
    assert sum("nothing of that name was recorded" in line for line in told) == 1
