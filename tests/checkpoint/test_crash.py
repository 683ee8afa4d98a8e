"""Kill -9 at every point that a run of saves passes, in a child process, and look at what is left."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.faults import armed, passed

MakeRig = Callable[..., Any]


@pytest.fixture(params=[0, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    """In one file, and in two that are written at the same time."""
    count: int = request.param
    return count


def run_in_child(make_rig: MakeRig, folder: Path, acknowledged: Path, fault: str) -> int:
    """Three saves with keep_last 1; the exit status. Acknowledgements are noted in a file as they come."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        with armed(fault), acknowledged.open("a", buffering=1) as notes:
            run_saves(make_rig, folder, notes.write)
    finally:
        os._exit(0)


def run_saves(make_rig: MakeRig, folder: Path, note: Callable[[str], Any]) -> None:
    def emit(event: object) -> None:
        if getattr(event, "status", "") == "durable":
            note(f"{event.step}\n")  # type: ignore[attr-defined]

    rig = make_rig(folder, mode="async", keep_last=1, last_step=6, emit=emit)
    rig.restore()
    rig.run(6)


def points_of_a_run(make_rig: MakeRig, folder: Path) -> list[str]:
    with passed() as names:
        run_saves(make_rig, folder, lambda text: None)
    return names


def test_no_kill_loses_an_acknowledged_checkpoint_or_shows_an_unfinished_one(make_rig: MakeRig, tmp_path: Path) -> None:
    names = points_of_a_run(make_rig, tmp_path / "probe")
    assert names.count("checkpoint.acknowledged") == 3 and "checkpoint.retention.unlink" in names
    for index, name in enumerate(names):
        nth = names[: index + 1].count(name)
        folder, notes = tmp_path / f"run-{index}", tmp_path / f"notes-{index}"
        status = run_in_child(make_rig, folder, notes, f"{name}=kill@{nth}")
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{name}@{nth}"
        newest_acknowledged = max(map(int, notes.read_text().split()), default=0)
        rig = make_rig(folder, attempt=2, last_step=6, keep_last=1)
        rig.restore()
        assert rig.state.step >= newest_acknowledged and rig.is_at(rig.state.step), f"{name}@{nth}"
        assert rig.warnings() == [] and not any("." in left for left in rig.names()), f"{name}@{nth}"
        rig.run(6)
        assert rig.is_at(6) and rig.names() == ["step-00000006"], f"{name}@{nth}"


@pytest.mark.parametrize("action", ["disk-full", "raise"])
def test_no_failure_at_any_point_loses_an_acknowledged_checkpoint(
    make_rig: MakeRig, tmp_path: Path, action: str
) -> None:
    names = [name for name in points_of_a_run(make_rig, tmp_path / "probe") if "probe" not in name]
    for index, name in enumerate(names):
        nth = names[: index + 1].count(name)
        folder = tmp_path / f"run-{index}"
        first = make_rig(folder, on_failure="continue", keep_last=1, last_step=8)
        with armed(f"{name}={action}@{nth}"):
            first.run(6)
        rig = make_rig(folder, attempt=2, last_step=8)
        rig.restore()
        assert rig.state.step == max(first.statuses("durable")) and rig.is_at(rig.state.step), f"{name}@{nth}"
