"""The power is cut before every operation of a run of saves, and the disk loses what it may: what is left is restored.

Modules: tidemill.checkpoint.manager, tidemill.checkpoint.commit, tidemill.checkpoint.retention,
tidemill.checkpoint.attempts.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.residency.life_cycle_turns import in_turn

from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.durable import replace_durably
from tidemill.errors import CheckpointError
from tidemill.faults import armed
from tidemill.testing.volatile_disk import Choose, PowerCut, VolatileDisk

MakeRig = Callable[..., Any]


@pytest.fixture(params=[0, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    """In one file, and in two."""
    count: int = request.param
    return count


def adversaries(seed: int, count: int) -> Iterator[tuple[str, Choose]]:
    """Nothing that was not synced is left, all of it, and some of it in several ways."""
    yield "nothing", lambda options: 0
    yield "everything", lambda options: options - 1
    for number in range(count):
        yield f"some ({number})", random.Random(seed * 1000 + number).randrange


def saves(make_rig: MakeRig, run: Path, disk: VolatileDisk, cut: int) -> int:
    """Three saves, of which the last stays, with the power cut after `cut` operations; the newest acknowledged step."""
    disk.cut(after=cut)
    events: list[Any] = []
    with contextlib.suppress(PowerCut):
        rig = make_rig(run / "checkpoints", attempt=next_attempt(run), keep_last=1, last_step=6, emit=events.append)
        rig.restore()
        rig.run(6)
    return max((event.step for event in events if getattr(event, "status", "") == "durable"), default=0)


def operations(make_rig: MakeRig, run: Path) -> int:
    run.mkdir()
    with VolatileDisk(run, before=in_turn) as disk:
        assert saves(make_rig, run, disk, cut=10**6) == 6
        return disk.operations


def losses(make_rig: MakeRig, base: Path, cut: int) -> Iterator[str]:
    """What is wrong after a power cut at that moment, by the adversary."""
    run = base / f"run-{cut}"
    run.mkdir()
    with VolatileDisk(run, before=in_turn) as disk:
        acknowledged = saves(make_rig, run, disk, cut)
        for number, (name, choose) in enumerate(adversaries(cut, 3)):
            left = base / f"left-{cut}-{number}"
            disk.leave(left, choose)
            rig = make_rig(left / "checkpoints", attempt=next_attempt(left), last_step=6, keep_last=1)
            try:
                rig.restore()
            except CheckpointError as error:
                yield f"I10: step {acknowledged} was acknowledged, and of {name} nothing can be restored: {error}"
                continue
            if rig.state.step < acknowledged:
                yield f"I10: step {acknowledged} was acknowledged, {rig.state.step} is left of {name}"
            if not rig.is_at(rig.state.step):
                yield f"I9: what is restored of {name} is not one version"


def test_no_power_cut_loses_an_acknowledged_checkpoint_or_shows_an_unfinished_one(
    make_rig: MakeRig, tmp_path: Path, ranks: int
) -> None:
    count = operations(make_rig, tmp_path / "whole")
    assert count > 50
    for cut in range(count + 1):
        assert list(losses(make_rig, tmp_path, cut)) == [], f"before operation {cut}"


def test_a_run_whose_power_is_cut_again_and_again_ends_as_one_that_never_was(
    make_rig: MakeRig, tmp_path: Path, ranks: int
) -> None:
    dice, attempts, kept, starts = random.Random(ranks), [0], 0, 0
    run = tmp_path / "0"
    run.mkdir()
    while kept < 6:
        with VolatileDisk(run, before=in_turn) as disk:
            events: list[Any] = []
            with contextlib.suppress(PowerCut):
                disk.cut(after=dice.randrange(45))
                attempts.append(next_attempt(run))
                rig = make_rig(run / "checkpoints", attempt=attempts[-1], last_step=6, keep_last=1, emit=events.append)
                rig.restore()
                assert rig.is_at(rig.state.step) and rig.state.step >= kept
                rig.run(6)
            told = [event.step for event in events if getattr(event, "status", "") in ("durable", "restored")]
            kept = max([kept, *told])
            starts += 1
            run = tmp_path / str(starts)
            disk.leave(run, dice.randrange)
    assert attempts == sorted(set(attempts)) and len(attempts) > 5


def test_a_file_that_is_replaced_has_the_old_or_the_new_content_whatever_is_lost(tmp_path: Path) -> None:
    for cut in range(8):
        run = tmp_path / f"run-{cut}"
        run.mkdir()
        (run / "a.json").write_bytes(b"old one")
        with VolatileDisk(run) as disk:
            disk.cut(after=cut)
            done = False
            with contextlib.suppress(PowerCut):
                replace_durably(run / "a.json", b"new", faults="test")
                done = True
            for number, (name, choose) in enumerate(adversaries(cut, 10)):
                left = tmp_path / f"left-{cut}-{number}"
                disk.leave(left, choose)
                found = (left / "a.json").read_bytes()
                assert found == b"new" if done else found in (b"old one", b"new"), f"{name}, before operation {cut}"
    assert done


@pytest.mark.parametrize("step", ["checkpoint.fsync-file", "checkpoint.fsync-state", "checkpoint.fsync-manifest"])
def test_these_tests_notice_a_file_that_is_not_synced(make_rig: MakeRig, tmp_path: Path, step: str) -> None:
    count = operations(make_rig, tmp_path / "whole")
    with armed(f"{step}=skip"):
        found = next(text for cut in range(count) for text in losses(make_rig, tmp_path, cut))
    assert found.startswith("I10")


@pytest.mark.parametrize("point", ["checkpoint.fsync-manifest", "checkpoint.rename", "checkpoint.fsync-parent"])
def test_a_first_save_that_failed_stops_no_later_start_whatever_is_lost(
    make_rig: MakeRig, tmp_path: Path, point: str, ranks: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with VolatileDisk(run, before=in_turn) as disk:
        rig = make_rig(run / "checkpoints", on_failure="continue")
        rig.restore()
        with armed(f"{point}=disk-full"):
            rig.run(2)
        assert rig.statuses("failed") == [2] and rig.names() == []
        for number, (name, choose) in enumerate(adversaries(7, 150)):
            left = tmp_path / f"left-{number}"
            disk.leave(left, choose)
            again = make_rig(left / "checkpoints", attempt=2)
            again.restore()
            assert again.is_at(again.state.step), name
