"""Faults of kind B that are of saves: B01, B04, B09 and B19. Others are shown where their test is named: see the table.

B05, B06, B08, B16 in tests/e2e, B17 in test_resume_equality, B10, B12, B13, B14 in test_kind_b_exports.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.catalog import newest
from tidemill.checkpoint.manifest import FORMAT
from tidemill.cli.main import main
from tidemill.errors import CheckpointError
from tidemill.faults import calling, passed

MakeRig = Callable[..., Any]
FORMATS = Path(__file__).parents[1] / "data" / "checkpoints"


@pytest.mark.parametrize("ranks", [0, 2])
def test_b01_a_save_cut_short_before_any_of_its_files_is_never_taken_under_either_name(
    make_rig: MakeRig, tmp_path: Path, ranks: int
) -> None:
    """B01: cut short on its way it is cleared in silence, under its own name passed over with a warning."""
    made = make_rig(of=ranks)
    made.run(4)
    files = ["trainer-*", "state.json", "manifest.json"]
    order = [path for pattern in files for path in sorted((made.folder / "step-00000004").glob(pattern))]
    assert len(order) == 2 + max(ranks, 1)
    for count in range(len(order)):
        for name in ("step-00000004.1.tmp", "step-00000004"):
            folder = tmp_path / f"{count} of {name}"
            shutil.copytree(made.folder / "step-00000002", folder / "step-00000002")
            (folder / name).mkdir()
            for path in order[:count]:
                shutil.copy(path, folder / name)
            rig = make_rig(folder, of=ranks, attempt=2)
            rig.restore()
            assert rig.is_at(2)
            assert len(rig.warnings()) == (not name.endswith(".tmp"))
            assert all("step-00000004 is not whole" in text for text in rig.warnings())
            rig.run(6)
            assert rig.is_at(6) and rig.statuses("durable") == [4, 6]


class Scores:
    """Implements Measured: the second save is the best."""

    def values(self) -> Mapping[int, float]:
        """By step."""
        return {step: float(step == 4) for step in range(11)}

    def names(self) -> Sequence[str]:
        """One."""
        return ("eval/reward",)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, [10]), ({"keep_best": "eval/reward", "measured": Scores()}, [4, 10]), ({"keep_every": 6}, [6, 10])],
    ids=["the last", "and the best", "and each sixth"],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_b04_at_every_moment_of_five_saves_of_which_one_is_kept_a_whole_one_is_there(
    make_rig: MakeRig, tmp_path: Path, options: dict[str, Any], kept: list[int], mode: str
) -> None:
    """B04: looked at before each file, sync, rename and deletion, as a kill there would leave it."""
    with passed() as names:
        make_rig(tmp_path / "before", keep_last=1, mode=mode, **options).run(10)
    rig = make_rig(keep_last=1, mode=mode, **options)
    rig.run(2)
    seen: list[int] = []

    def look() -> None:
        stored, rejected = newest(rig.folder)
        assert stored is not None and not rejected
        seen.append(stored.state.step)

    with contextlib.ExitStack() as stack:
        for name in set(names):
            stack.enter_context(calling(name, look))
        rig.run(10)
    assert len(seen) > 40 and seen == sorted(seen)
    assert rig.names() == [f"step-{step:08d}" for step in kept]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_b09_of_ten_saves_of_two_ranks_one_process_publishes_and_the_late_rank_is_waited_for(
    make_rig: MakeRig, mode: str
) -> None:
    """B09: a rank is late before, the driver before and after the rename; ranks write into a folder without a name."""
    rig = make_rig(of=2, mode=mode, every=1, keep_last=1)
    told: list[str] = []

    def late(path: Path, tell: Callable[[int], None]) -> None:
        told.append(path.parent.name)
        time.sleep(0.02)

    rig.trainer.workers[1].fault = late
    with calling("checkpoint.rename", lambda: time.sleep(0.01)):
        rig.run(5)
    with calling("checkpoint.fsync-parent", lambda: time.sleep(0.01)):
        rig.run(10)
    assert rig.statuses("durable") == list(range(1, 11)) and rig.statuses("failed") == []
    assert rig.names() == ["step-00000010"]
    assert told == [f"step-{step:08d}.1.tmp" for step in range(1, 11)]


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_b19_a_save_of_every_format_that_a_release_wrote_is_loaded_by_this_one(
    make_rig: MakeRig, tmp_path: Path, number: int
) -> None:
    """B19: kept byte for byte as it was written, and gone on from."""
    folder = tmp_path / "kept"
    shutil.copytree(FORMATS / f"format-{number}", folder)
    rig = make_rig(folder, of=1, attempt=2)
    rig.trainer.size = 64
    rig.trainer.data = rig.trainer.wanted(0)
    rig.restore()
    assert rig.is_at(2)
    rig.run(4)
    assert rig.names() == ["step-00000002", "step-00000004"]


def test_b19_a_save_of_a_format_to_come_says_which_release_reads_it_and_nothing_older_is_taken(
    make_rig: MakeRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B19: never a bare missing-file error, and never a silent step back."""
    run = tmp_path / "run"
    make_rig(run / "checkpoints").run(2)
    later = run / "checkpoints" / "step-00000004"
    later.mkdir()
    (later / "manifest.json").write_text(json.dumps({"format": FORMAT + 1, "release": "9.9.0"}))
    with pytest.raises(CheckpointError, match=r"use tidemill 9\.9\.0 or later"):
        make_rig(run / "checkpoints", attempt=2).restore()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert main(["ckpt", "verify", str(run)]) != 0
    assert "use tidemill 9.9.0 or later" in "".join(capsys.readouterr())
