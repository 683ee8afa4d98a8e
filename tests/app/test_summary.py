import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.app.summary import as_it_lies, is_finished, summarize

LINES = {
    "metrics.jsonl": [
        {"kind": "metrics", "step": 0, "policy/loss": 1.0},
        {"kind": "metrics", "step": 1, "reward/mean": 0.25},
        {"kind": "eval", "step": 1, "eval/reward": 0.5},
        {"kind": "metrics", "step": 2, "reward/mean": 0.75},
        {"kind": "eval", "step": 3, "eval/reward": 1.0},
    ],
    "events.jsonl": [
        {"kind": "phase", "step": 1, "name": "sleep", "owner": "trainer", "seconds": 0.1},
        {"kind": "phase", "step": 1, "name": "sleep", "owner": "engine", "seconds": 0.1},
        {"kind": "phase", "step": 1, "name": "wake_up", "owner": "trainer", "seconds": 0.1},
        {"kind": "phase", "step": 1, "name": "save_stall", "owner": "checkpoint", "seconds": 0.25},
        {"kind": "checkpoint", "step": 1, "checkpoint_step": 2, "status": "staged"},
        {"kind": "checkpoint", "step": 1, "checkpoint_step": 2, "status": "durable"},
        {"kind": "checkpoint", "step": 2, "checkpoint_step": 2, "status": "durable"},
    ],
}
GARBAGE = [
    b"\xff\xfe\x00 not ours\n",
    b'{"kind":"metrics","step":1,"reward/mean":"x"}\n',
    b'{"kind":"metrics","step":1,"reward/mean":true,"eval/reward":{}}\n',
    b'{"kind":"checkpoint","step":1,"status":"durable"}\n',
    b'{"kind":"phase","step":1}\n',
    b'{"kind":"phase","step":1,"name":"save_stall","seconds":"long"}\n',
    b'{"kind":"phase","step":1,"name":["sleep"],"owner":"trainer"}\n',
    b'{"kind":"metrics","step":2,"reward/mean":9',
]


def record(run: Path) -> None:
    for name, lines in LINES.items():
        (run / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def figures(run: Path, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"steps": 0, "seconds": 2.0, "finished": False, "export": None}
    return {**summarize(run, **given | changed), "peak_host_bytes": 0}


def test_the_figures_are_those_of_the_lines(tmp_path: Path) -> None:
    record(tmp_path)
    assert figures(tmp_path, steps=3, finished=True, export=tmp_path) == {
        "steps": 3,
        "finished": True,
        "seconds": 2.0,
        "eval_first": 0.5,
        "eval_last": 1.0,
        "reward_first": 0.5,
        "reward_last": 0.5,
        "checkpoints": 1,
        "sleeps": 1,
        "wakes": 1,
        "save_stall_seconds": 0.25,
        "peak_host_bytes": 0,
        "export": str(tmp_path),
    }


def test_a_run_that_was_stopped_counts_the_steps_that_it_recorded(tmp_path: Path) -> None:
    record(tmp_path)
    assert figures(tmp_path)["steps"] == 3


def test_a_checkpoint_counts_once_and_also_when_its_writer_died_before_it_said_so(tmp_path: Path) -> None:
    record(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        for step, status in ((2, "restored"), (4, "staged"), (4, "restored"), (4, "pruned"), (6, "failed")):
            line = {"kind": "checkpoint", "step": step, "checkpoint_step": step, "status": status}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    assert figures(tmp_path)["checkpoints"] == 2


def test_lines_that_are_not_ours_change_no_figure(tmp_path: Path) -> None:
    record(tmp_path)
    wanted = figures(tmp_path)
    for name in LINES:
        path = tmp_path / name
        path.write_bytes(b"".join(GARBAGE[:-1]) + path.read_bytes() + GARBAGE[-1])
    assert figures(tmp_path) == wanted


def test_a_run_without_files_has_no_figures_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    found = figures(tmp_path)
    assert (found["steps"], found["reward_last"], found["checkpoints"]) == (0, None, 0)


def finished(run: Path, **changed: Any) -> dict[str, Any]:
    return figures(run, steps=14, finished=True, export=run) | changed


def test_a_run_is_finished_when_all_is_done_that_is_asked_for(tmp_path: Path) -> None:
    summary = finished(tmp_path)
    assert is_finished(summary, steps=14, export=True)
    assert is_finished(summary, steps=10, export=True)
    assert not is_finished(summary, steps=15, export=True)
    without = summary | {"export": None}
    assert is_finished(without, steps=14, export=False)
    assert not is_finished(without, steps=14, export=True)
    assert not is_finished(summary | {"export": str(tmp_path / "gone")}, steps=14, export=True)


def test_a_run_whose_folder_was_moved_is_finished_by_the_export_that_moved_with_it(tmp_path: Path) -> None:
    (tmp_path / "there" / "step-00000014").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    summary = finished(tmp_path) | {"export": str(tmp_path / "there" / "step-00000014")}
    assert not is_finished(as_it_lies(summary, tmp_path / "here"), steps=14, export=True)
    (tmp_path / "there" / "step-00000014").rename(tmp_path / "here" / "step-00000014")
    moved = as_it_lies(summary, tmp_path / "here")
    assert moved["export"] == str(tmp_path / "here" / "step-00000014")
    assert is_finished(moved, steps=14, export=True)
    for odd in ({"export": None}, {"export": 5}, {}):
        assert as_it_lies(odd, tmp_path) == odd


@pytest.mark.parametrize(
    "changed", [{"steps": "many"}, {"steps": None}, {"steps": True}, {"finished": "yes"}, {"export": 5}]
)
def test_a_summary_that_is_not_ours_finishes_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert not is_finished(finished(tmp_path, **changed), steps=14, export=True)
    assert not is_finished({"finished": True, "steps": 14, "export": str(tmp_path)}, steps=14, export=True)
    assert not is_finished({}, steps=0, export=False)
