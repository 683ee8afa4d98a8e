"""A run on fakes is killed, with and without a power cut, before every operation on the disk: of starts that walk back
over broken checkpoints, of trials before the first step, of saves, of retention, and of exports.

Saves and restores of whole checkpoints alone: tests/checkpoint/test_power_cut.py.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import FakeTrainer, Rig
from tests.checkpoint.test_exports import exports, snapshot_of
from tests.checkpoint.test_power_cut import adversaries
from tests.residency.life_cycle_turns import in_turn
from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.catalog import checkpoint_name, entries, problems_of
from tidemill.testing.tiny import make_tiny_model
from tidemill.testing.volatile_disk import PowerCut, VolatileDisk

RANKS = (0, 2)
Job = Callable[[Path], None]


def left_of_each_kill(base: Path, prepared: Path, job: Job, told: list[Any]) -> Iterator[tuple[str, Path, list[Any]]]:
    """By kill and adversary: what is left of a copy of `prepared` when `job` is killed in it, and what `told` was told.

    The last one is not killed.
    """
    cut, ended = 0, False
    while not ended:
        run = base / f"run-{cut}"
        shutil.copytree(prepared, run)
        told.clear()
        with VolatileDisk(run, before=in_turn) as disk:
            disk.cut(after=cut)
            with contextlib.suppress(PowerCut):
                job(run)
                ended = True
            so_far = list(told)
            nothing, everything, some = adversaries(cut, 1)
            for number, (name, choose) in enumerate([everything if cut % 2 else nothing, some]):
                left = base / f"left-{cut}-{number}"
                disk.leave(left, choose)
                yield f"before operation {cut}, {name} is left", left, so_far
                shutil.rmtree(left)
        shutil.rmtree(run)
        cut += 1


def acknowledged(events: list[Any]) -> int:
    told = [event.step for event in events if getattr(event, "status", "") in ("durable", "restored")]
    return max(told, default=0)


def break_newest(folder: Path) -> None:
    """One has no manifest, the one before it another bit."""
    older, newest = (entry.path for entry in entries(folder)[-2:])
    (newest / "manifest.json").unlink()
    state = bytearray((older / "state.json").read_bytes())
    state[len(state) // 2] ^= 1
    (older / "state.json").write_bytes(state)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_start_that_walks_back_and_tries_a_save_loses_nothing_whenever_it_is_killed(
    tmp_path: Path, ranks: int
) -> None:
    prepared, told = tmp_path / "prepared", list[Any]()

    def rig(run: Path, **options: Any) -> Rig:
        options = {"attempt": next_attempt(run), "last_step": 8, "keep_last": 2, "trial": True, **options}
        return Rig(run / "checkpoints", options, FakeTrainer(ranks=ranks))

    prepared.mkdir()
    first = rig(prepared, keep_last=4)
    first.restore()
    first.run(6)
    break_newest(prepared / "checkpoints")

    def go_on(run: Path) -> None:
        again = rig(run, emit=told.append)
        again.restore()
        again.run(8)

    kills = 0
    for kill, left, events in left_of_each_kill(tmp_path, prepared, go_on, told):
        kills += 1
        newest = rig(left)
        newest.restore()
        assert newest.state.step >= max(2, acknowledged(events)) and newest.is_at(newest.state.step), kill
        whole = [entry.step for entry in entries(left / "checkpoints") if problems_of(entry)[0] is not None]
        assert len(whole) == len(entries(left / "checkpoints")), f"{kill}: what is broken is not aside"
        newest.run(8)
        assert newest.is_at(8) and [entry.step for entry in entries(left / "checkpoints")][-2:] == [6, 8], kill
    assert kills > 100


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_is_whole_or_not_there_whenever_it_is_killed(tmp_path: Path, ranks: int) -> None:
    from safetensors.numpy import load_file

    prepared = tmp_path / "prepared"
    prepared.mkdir()
    base = make_tiny_model(tmp_path / "base", hidden=16, heads=2, kv_heads=2)
    arrays = {name: array + 1 for name, array in load_file(base / "model.safetensors").items()}

    def write(run: Path) -> None:
        ours = exports(run / "export", base)
        ours.clear()
        ours.attempt([snapshot_of(arrays, ranks)])
        told.append(ours.write(4, [snapshot_of(arrays, ranks)]))

    def files(run: Path) -> dict[str, bytes]:
        target = run / "export" / checkpoint_name(4)
        return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}

    told = list[Any]()
    write(tmp_path / "whole")
    wanted, kills = files(tmp_path / "whole"), 0
    for kill, left, paths in left_of_each_kill(tmp_path, prepared, write, told):
        kills += 1
        assert files(left) == wanted or not (paths or files(left)), kill
        write(left)
        assert files(left) == wanted, kill
    assert kills > 40
