"""`tidemill ckpt prune` (tidemill.cli.ckpt_prune)."""

import json

import numpy as np
import pytest
from tests.cli.conftest import Ckpt, SavedRun

from tidemill.checkpoint.lock import RunLock
from tidemill.checkpoint.retention import folder_bytes
from tidemill.faults import armed


@pytest.fixture
def run(saved: SavedRun) -> SavedRun:
    """The run's own rule keeps the last one and multiples of 4."""
    for step in (2, 4, 6, 8, 10):
        saved.save(step, {"model/w": np.full((4, 4), step, dtype=np.float32)})
    return saved


def left(run: SavedRun) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir())


def test_without_words_the_rule_of_the_run_is_used(run: SavedRun, ckpt: Ckpt) -> None:
    size = folder_bytes(run.path(2)) + folder_bytes(run.path(6))
    assert ckpt("prune", run.folder, "--json") == 0
    told = ckpt.told
    assert left(run) == [4, 8, 10]
    assert (told["gone"], told["go"], told["bytes"], told["warnings"]) == ([2, 6], [2, 6], size, [])
    assert [kept["why"] for kept in told["kept"]] == ["a multiple of 4", "a multiple of 4", "the newest"]
    assert ckpt("prune", run.folder) == 0
    assert ckpt.out.splitlines()[-1] == "0 B are freed"


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (["--keep-every", 0], [10]),
        (["--keep-last", 3], [4, 6, 8, 10]),
        (["--keep-every", 0, "--keep", "2,6"], [2, 6, 10]),
        (["--keep-every", 6], [6, 10]),
        (["--keep-every", 0, "--keep-best=-policy/loss"], [6, 10]),
        (["--keep-every", 0, "--keep-best", "policy/loss"], [2, 10]),
    ],
)
def test_what_is_said_counts_before_the_rule_of_the_run(
    run: SavedRun, ckpt: Ckpt, words: list[object], stays: list[int]
) -> None:
    lines = [{"kind": "metrics", "step": step, "policy/loss": loss} for step, loss in ((2, 0.5), (4, 0.2), (6, 0.1))]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ckpt("prune", run.folder, *words, "--dry-run", "--json") == 0
    assert [kept["step"] for kept in ckpt.told["kept"]] == stays and left(run) == [2, 4, 6, 8, 10]
    assert not (run.folder / "lock").exists()
    assert ckpt("prune", run.folder, *words) == 0
    assert left(run) == stays
    assert "step 10 stays: the newest" in ckpt.out


def test_while_a_run_holds_the_folder_nothing_goes(run: SavedRun, ckpt: Ckpt) -> None:
    with RunLock(run.folder):
        assert ckpt("prune", run.folder) == 2
        assert "is using it" in ckpt.err
        assert ckpt("prune", run.folder, "--dry-run") == 0
        assert ckpt.out.splitlines()[-1].endswith("would be freed")
    assert left(run) == [2, 4, 6, 8, 10]


def test_the_newest_whole_one_stays_and_broken_later_ones_are_not_touched(run: SavedRun, ckpt: Ckpt) -> None:
    run.damage(10)
    (run.path(8) / "manifest.json").unlink()
    assert ckpt("prune", run.folder, "--keep-every", 0) == 0
    assert "step-00000010 is not whole and is passed over" in ckpt.err
    assert left(run) == [6, 8, 10]
    for step in (6, 10):
        (run.path(step) / "state.json").unlink()
    assert ckpt("prune", run.folder) == 1
    assert "none of its 3 checkpoints is whole" in ckpt.err and left(run) == [6, 8, 10]


def test_what_cannot_be_deleted_is_told_and_fails(run: SavedRun, ckpt: Ckpt) -> None:
    with armed("checkpoint.retention.rename=disk-full"):
        assert ckpt("prune", run.folder, "--json") == 1
    told = ckpt.told
    assert (told["go"], told["gone"]) == ([2, 6], [6]) and "cannot delete the old checkpoint" in told["warnings"][0]
    assert ckpt("prune", run.folder) == 0 and left(run) == [4, 8, 10]


def test_only_a_run_can_be_pruned_and_only_steps_that_are_there_kept(run: SavedRun, ckpt: Ckpt) -> None:
    for path in (run.path(2), run.folder / "checkpoints"):
        assert ckpt("prune", path) == 2
        assert "but is no run's folder; name that (run.dir)" in ckpt.err
    assert ckpt("prune", run.folder, "--keep", "2,3") == 2
    assert "cannot keep step 3: there is no checkpoint of it" in ckpt.err
    with pytest.raises(SystemExit) as ended:
        ckpt("prune", run.folder, "--keep-last", 0)
    assert ended.value.code == 2 and left(run) == [2, 4, 6, 8, 10]


def test_a_link_to_a_run_takes_the_lock_of_the_run(run: SavedRun, ckpt: Ckpt) -> None:
    link = run.folder.with_name("link")
    link.symlink_to(run.folder)
    with RunLock(run.folder):
        assert ckpt("prune", link) == 2
    assert ckpt("prune", link) == 0 and left(run) == [4, 8, 10]
