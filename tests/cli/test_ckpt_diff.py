"""`tidemill ckpt diff` (tidemill.cli.ckpt_diff)."""

import numpy as np
import pytest
from tests.cli.conftest import Ckpt, SavedRun

W = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def run(saved: SavedRun) -> SavedRun:
    saved.save(2, {"model/w": W, "model/b": W, "optimizer/m": W})
    changed = W.copy()
    changed[2, 1] += 0.5
    saved.save(4, {"model/w": changed, "model/b": W.T.copy(), "optimizer/v": W}, ranks=2, lr=0.1)
    return saved


def test_a_checkpoint_equals_itself_however_it_is_cut(run: SavedRun, saved: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("diff", run.path(2), run.path(2)) == 0
    assert ckpt.out.splitlines()[-1] == "equal"
    other = SavedRun(run.folder.with_name("other"), run.base)
    other.save(2, {"model/w": W, "model/b": W, "optimizer/m": W}, ranks=3, attempt=2)
    assert ckpt("diff", run.path(2), other.folder, "--tensors", "--json") == 0
    assert ckpt.told["equal"] is True and ckpt.told["same_tensors"] == 3
    assert ckpt("diff", run.path(2), other.folder) == 1  # the ranks are part of the state
    assert "trainer.ranks: 1 -> 3" in ckpt.out and "attempt: 1 -> 2" in ckpt.out


def test_two_steps_of_a_run_say_what_changed_and_how_far(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("diff", run.folder, "--steps", "2,4", "--json") == 1
    told = ckpt.told
    assert told["settings"] == ["lr: not set -> 0.1"] and told["identity"] == []
    assert "run.cursor.position: 2 -> 4" in told["state"] and "run.step: 2 -> 4" in told["state"]
    found = {one["name"]: one for one in told["tensors"]}
    assert (found["model/b"]["how"], found["model/b"]["text"]) == ("another shape", "[3, 2] -> [2, 3]")
    assert found["optimizer/m"]["how"] == "only in the first" and found["optimizer/v"]["how"] == "only in the second"
    norm = float(np.linalg.norm(W))
    assert found["model/w"]["change"] == {
        "elements": 1, "largest": 0.5, "mean": pytest.approx(0.5 / 6), "relative": pytest.approx(0.5 / norm),
    }  # fmt: skip
    assert ckpt("diff", run.folder, "--steps", "2,4") == 1
    lines = ckpt.out.splitlines()
    assert lines[-1] == "different" and "tensors: 0 the same, 4 not" in lines
    assert ["trainer", "model/w", "changed", "1", "0.5", "0.0833", "0.0674"] in [line.split() for line in lines]


def test_one_thing_or_three_steps_cannot_be_compared(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("diff", run.folder) == 2
    assert "name a second one, or two steps of the run with --steps N,N" in ckpt.err
    assert ckpt("diff", run.folder, "--steps", "2,4,6") == 2
    assert ckpt("diff", run.folder, "--steps", "2,6") == 2
    assert "no checkpoint of step 6" in ckpt.err


def test_a_damaged_one_is_never_called_equal(run: SavedRun, ckpt: Ckpt) -> None:
    run.damage(2)
    assert ckpt("diff", run.path(2), run.path(2)) == 1
    assert "cannot compare" in ckpt.err and ckpt.out == ""


def test_a_long_text_of_the_state_is_cut(run: SavedRun, ckpt: Ckpt) -> None:
    run.save(6, {"model/w": W}, note="x" * 1000)
    assert ckpt("diff", run.path(2), run.path(6)) == 1
    assert max(map(len, ckpt.out.splitlines())) < 200
