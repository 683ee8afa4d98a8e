"""What may happen to a run while it saves: it ends as one that nothing happened to, or says what is in the way."""

import json
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.checkpoint.real_runs import (
    RANKS,
    STOPPED,
    checkpoint_of,
    curves_of,
    lines_of,
    notices,
    started,
    steps_of,
    whole_steps,
)
from tests.crash.small_run import STEPS, Outcome, outcome, prepare
from tidemill.cli.main import main
from tidemill.faults import calling

INTERRUPTED = 130
STAGES = [
    "checkpoint.mkdir",
    "checkpoint.open",
    "checkpoint.write",
    "checkpoint.fsync-file",
    "checkpoint.state",
    "checkpoint.manifest",
    "checkpoint.fsync-attempt",
    "checkpoint.rename",
    "checkpoint.fsync-parent",
    "checkpoint.acknowledged",
    "checkpoint.retention.rename",
    "checkpoint.retention.unlink",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures of saves")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Outcome:
    assert started(base, base / "whole") == 0
    return outcome(base / "whole")


def test_a_signal_in_any_stage_of_a_save_that_is_waited_for_loses_nothing(base: Path, whole: Outcome) -> None:
    run, words = base / "signals", ("checkpoint.every=1", "checkpoint.mode=sync")
    for number, stage in enumerate(STAGES):
        kind, code = ("SIGTERM", STOPPED) if number % 2 else ("SIGINT", INTERRUPTED)
        assert started(base, run, *words, faults=f"{stage}=stop:{kind}") == code, stage
        assert whole_steps(run)[-1] == number + 1, stage
    assert started(base, run, *words) == 0
    assert outcome(run) == whole


@pytest.mark.parametrize(
    ("kind", "code", "stages"),
    [
        ("SIGTERM", STOPPED, ["checkpoint.open", "checkpoint.manifest"]),
        ("SIGINT", INTERRUPTED, ["checkpoint.rename", "checkpoint.acknowledged"]),
    ],
)
def test_a_signal_while_a_save_is_written_behind_the_run_lets_it_end_and_saves_the_present_state_too(
    base: Path, whole: Outcome, kind: str, code: int, stages: list[str]
) -> None:
    run, before = base / f"behind, {kind}", 0
    for stage in stages:
        assert started(base, run, faults=f"{stage}=stop:{kind}") == code, stage
        (*_, newest) = whole_steps(run)
        assert newest > before
        assert not [path for path in (run / "checkpoints").iterdir() if path.name.endswith(".tmp")]
        before = newest
    assert started(base, run) == 0
    assert outcome(run) == whole


@pytest.mark.parametrize("stage", ["export.open", "export.write", "export.rename"])
def test_a_signal_while_the_last_export_is_written_comes_too_late_to_lose_it(
    base: Path, whole: Outcome, stage: str
) -> None:
    run = base / f"late {stage}"
    shutil.copytree(base / "whole", run)
    shutil.rmtree(run / "export")
    assert started(base, run, faults=f"{stage}=stop") in (0, STOPPED)
    assert started(base, run) == 0
    assert outcome(run) == whole
    assert json.loads((run / "summary.json").read_text())["finished"] is True


def test_b06_a_disk_slower_than_the_steps_makes_them_wait_tells_how_long_and_keeps_the_order(
    base: Path, whole: Outcome
) -> None:
    """B06: one is kept, and the one before it goes only after the new one is durable."""
    run = base / "slow disk"
    with calling("checkpoint.fsync-file", lambda: time.sleep(0.2)):
        assert started(base, run, "checkpoint.every=1", "checkpoint.keep_last=1") == 0
    assert outcome(run) == whole
    assert whole_steps(run) == [STEPS]
    events = [line for line in lines_of(run, "events.jsonl") if line["kind"] == "checkpoint"]
    assert [event["checkpoint_step"] for event in events if event["status"] == "durable"] == list(range(1, STEPS + 1))
    assert not [event for event in events if event["status"] == "failed"]
    assert json.loads((run / "summary.json").read_text())["save_stall_seconds"] > 0.5
    # Never two at once: each is staged after the one before is durable.
    order = [event["status"] for event in events if event["status"] in ("staged", "durable")]
    assert all(one != other for one, other in pairwise(order))
    assert [event["checkpoint_step"] for event in events if event["status"] == "pruned"] == list(range(1, STEPS))


def test_a_clock_that_goes_backwards_within_and_between_starts_decides_nothing(
    base: Path, whole: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = base / "clock", 'recorder.use=["tensorboard"]'
    now = [time.time()]

    def back() -> float:
        now[0] -= 0.001
        return now[0]

    monkeypatch.setattr(time, "time", back)
    for _ in range(2):
        assert started(base, run, words, faults="weights.publish=stop@4") == STOPPED
        now[0] -= 86400
    assert started(base, run, words) == 0
    now[0] -= 86400
    assert outcome(run) == whole
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [12, 14]
    assert all(row["age"] == 0.0 and row["verified"] for row in rows)
    assert [step for step, _ in curves_of(run)["policy/loss"]] == list(range(STEPS))


def test_a_run_folder_that_is_moved_between_two_starts_goes_on_where_it_is(
    base: Path, whole: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (base / f"place {number}" for number in range(3))
    assert started(base, first, faults="weights.publish=stop@4") == STOPPED
    first.rename(second)
    assert started(base, second) == 0
    assert outcome(second) == whole
    second.rename(third)
    capsys.readouterr()
    assert started(base, third) == 0
    assert steps_of(third) == list(range(STEPS))
    assert outcome(third) == whole
    assert not first.exists()


def test_paths_with_spaces_signs_of_all_scripts_and_links_are_like_any_other(tmp_path: Path) -> None:
    place = tmp_path / "ein Läuf ☃ 100% {run} $HOME #1" / "检查点"
    place.mkdir(parents=True)
    prepare(place)
    (place / "real run").mkdir()
    link = place / "link to the run"
    link.symlink_to(place / "real run")
    assert started(place, link, "steps=6", faults="weights.publish=stop@2") == STOPPED
    assert whole_steps(place / "real run")
    assert started(place, place / "real run", "steps=6") == 0
    assert link.is_symlink()
    AutoModelForCausalLM.from_pretrained(place / "real run" / "export" / "step-00000006")
    assert main(["ckpt", "verify", str(link)]) == 0
    assert main(["ckpt", "export", str(link), "--out", str(place / "out ☃")]) == 0
    AutoModelForCausalLM.from_pretrained(place / "out ☃")


def test_a_rank_that_is_killed_while_it_writes_ends_the_run_by_name_and_what_was_saved_before_carries_it_on(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = base / "killed writer", (*RANKS, "steps=7", "checkpoint.export=false", "eval.every=0")
    assert started(base, run, *words, faults="trainer-1/checkpoint.fsync-file=kill@2") == 1
    assert "trainer-1 died" in capsys.readouterr().err
    assert whole_steps(run) == [3]
    assert started(base, run, *words) == 0
    assert any("resuming from step-00000003" in text for text in notices(run))
    assert steps_of(run) == list(range(7))
    assert not [path for path in (run / "checkpoints").iterdir() if path.name not in ("step-00000006", "step-00000007")]


def test_b16_a_folder_whose_checkpoints_cannot_be_written_is_refused_before_the_first_step(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B16: tried at the start."""
    run = base / "no folder"
    run.mkdir()
    (run / "checkpoints").symlink_to("/proc/nowhere" if os.geteuid() == 0 else "/")
    assert started(base, run) == 1
    error = capsys.readouterr().err
    assert f"cannot keep checkpoints in {run / 'checkpoints'}" in error and "run.dir" in error
    assert not (run / "metrics.jsonl").exists() or not steps_of(run)
    assert not checkpoint_of(run, 3).exists()
