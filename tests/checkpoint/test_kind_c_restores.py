"""Faults of kind C that are of what is restored: C08, C09, C15 and C18."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.real_runs import (
    QUICK,
    RANKS,
    checkpoint_of,
    lines_of,
    notices,
    rows_of,
    started,
    steps_of,
    whole_steps,
)
from tests.residency.real_run import prepare_learning

from tidemill.checkpoint.catalog import newest
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import StoredCheckpoint, read_checkpoint
from tidemill.cli.main import main
from tidemill.contracts.checkpoint import SavedTensor, Snapshot, TensorBytes

MakeRig = Callable[..., Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restores")
    prepare_learning(folder)
    return folder


def bytes_of(tensors: Mapping[str, SavedTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def test_c08_each_load_in_one_process_reads_the_step_that_it_was_told(make_rig: MakeRig) -> None:
    """C08: an old one, the newest, the old one again; none of them changes what the next one is."""
    rig = make_rig(every=1, keep_last=0)
    rig.run(3)
    for step in (1, 3, 1, 2):
        stored = read_checkpoint(rig.folder / f"step-{step:08d}", step=step)
        assert bytes_of(stored.parts["trainer"].tensors) == rig.trainer.wanted(step)
        latest, _ = newest(rig.folder)
        assert latest is not None and bytes_of(latest.parts["trainer"].tensors) == rig.trainer.wanted(3)


def test_c08_steps_of_a_run_are_exported_by_their_number_in_any_order(base: Path) -> None:
    """C08: over the command line, in one process."""
    run = base / "by number"
    assert started(base, run, "steps=3", "checkpoint.every=1", "checkpoint.keep_last=3", *QUICK) == 0
    found = []
    for number, step in enumerate((1, 3, 1)):
        out = base / f"exported {number}"
        assert main(["ckpt", "export", str(run), "--step", str(step), "--out", str(out)]) == 0
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[2] != found[1]


def without_optimizer(stored: StoredCheckpoint, folder: Path) -> None:
    """The same checkpoint with weights alone, whole in every other way."""
    parts = {}
    for name, part in stored.parts.items():
        tensors = {
            key: TensorBytes(dtype=tensor.dtype, shape=tensor.shape, data=memoryview(bytes(tensor.data)))
            for key, tensor in part.tensors.items()
            if not key.startswith("optimizer/")
        }
        parts[name] = Snapshot(tensors=tensors, extra=part.extra)
    committer = Committer(
        folder=folder,
        attempt=stored.manifest.attempt,
        identity=stored.manifest.identity,
        settings=stored.manifest.settings,
        retention=stored.manifest.retention,
    )
    committer.commit(stage(stored.state, parts), lambda count: None)


def test_c09_moments_and_counts_go_on_over_a_resume_and_a_checkpoint_without_them_is_refused(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C09: equal moments, step count and next update; missing state is an error and changes nothing."""
    whole, run, bare = base / "moments", base / "moments, resumed", base / "no moments"
    assert started(base, whole, "steps=4", *QUICK) == 0
    for steps in (2, 4):
        assert started(base, run, f"steps={steps}", *QUICK) == 0
    one, other = (read_checkpoint(checkpoint_of(folder, 4), step=4).parts["trainer"] for folder in (whole, run))
    assert bytes_of(one.tensors) == bytes_of(other.tensors)
    moments = [bytes(held.data) for name, held in one.tensors.items() if name.startswith("optimizer/exp_avg_sq/")]
    assert moments and all(any(data) for data in moments)
    assert one.extra == other.extra and one.extra["updates"] == one.extra["optimizer_steps"] == 4
    (bare / "checkpoints").mkdir(parents=True)
    without_optimizer(read_checkpoint(checkpoint_of(whole, 4), step=4), bare / "checkpoints")
    capsys.readouterr()
    assert started(base, bare, "steps=6", *QUICK) == 1
    error = capsys.readouterr().err
    assert "tensors of the optimizer are not in the checkpoint" in error and "start a new run" in error
    assert whole_steps(bare) == [4]


@pytest.mark.parametrize("ranks", [(), RANKS])
def test_c09_a_fresh_optimizer_is_asked_for_by_name_and_told_of(base: Path, ranks: tuple[str, ...]) -> None:
    """C09: state missing means an error unless asked for. What is there is loaded all the same."""
    whole, bare = base / f"whole {len(ranks)}", base / f"accepted {len(ranks)}"
    accepted = 'checkpoint.accept=["optimizer"]'
    assert started(base, whole, "steps=4", *QUICK) == 0
    (bare / "checkpoints").mkdir(parents=True)
    without_optimizer(read_checkpoint(checkpoint_of(whole, 4), step=4), bare / "checkpoints")
    for run, counted in ((bare, 1), (whole, 5)):
        assert started(base, run, "steps=5", accepted, *QUICK, *ranks) == 0
        after = read_checkpoint(checkpoint_of(run, 5), step=5).parts["trainer"]
        assert (after.extra["updates"], after.extra["optimizer_steps"]) == (5, counted)
        told = [text for text in notices(run) if "begin at zero" in text]
        assert len(told) == (run is bare)


def test_c15_a_crash_and_a_resume_are_one_run_of_the_tracker_whose_steps_come_once_or_with_a_mark(base: Path) -> None:
    """C15: crashed at 5, resumed from 3."""
    pytest.importorskip("wandb")
    from tests.recorders.test_wandb import rows

    run = base / "tracked"
    words = ["steps=6", "checkpoint.every=3", 'recorder.use=["wandb"]', "recorder.wandb.mode=offline", *QUICK]
    assert started(base, run, *words, faults="trainer.update=raise@6") != 0
    assert steps_of(run) == [0, 1, 2, 3, 4]
    assert started(base, run, *words) == 0
    assert steps_of(run) == [0, 1, 2, 3, 4, 5]
    folders = [path for path in (run / "wandb").rglob("offline-run-*") if path.is_dir()]
    assert len(folders) == 2 and len({path.name.split("-")[3] for path in folders}) == 1
    seen = [(row["start"], row["step"]) for row in rows(run / "wandb") if "policy/loss" in row]
    assert seen == sorted(seen)
    assert {step for start, step in seen if start == 2} == {3, 4, 5}
    assert {step for start, step in seen if start == 1} <= {0, 1, 2, 3, 4}


def test_c18_a_total_at_or_below_what_is_done_does_no_step_and_a_greater_one_goes_on(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C18: exit code 0 and a plain word; the old optimizer never starts at step 0."""
    run = base / "totals"
    assert started(base, run, "steps=4", *QUICK) == 0
    before = [line for line in rows_of(run) if line["kind"] == "metrics"]
    capsys.readouterr()
    assert main(["run", str(base / "totals.toml"), "steps=4", *QUICK]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert started(base, run, "steps=3", *QUICK) == 0
    assert [line for line in rows_of(run) if line["kind"] == "metrics"] == before
    assert started(base, run, "steps=6", *QUICK) == 0
    assert steps_of(run) == list(range(6))
    state = json.loads((checkpoint_of(run, 6) / "state.json").read_text())
    assert (state["run"]["step"], state["parts"]["trainer"]["updates"]) == (6, 6)


def test_c18_a_start_from_saved_weights_alone_is_another_run_at_step_0_with_a_fresh_optimizer(base: Path) -> None:
    """C18: its own folder, the exported model as its base."""
    run, again = base / "weights saved", base / "weights alone"
    assert started(base, run, "steps=2", *QUICK, "checkpoint.export=true") == 0
    words = [f"model={run / 'export' / 'step-00000002'}", "steps=1", *QUICK]
    assert started(base, again, *words) == 0
    assert any("starting at step 0" in text for text in notices(again))
    assert steps_of(again) == [0]
    stored = read_checkpoint(checkpoint_of(again, 1), step=1)
    assert stored.parts["trainer"].extra["updates"] == 1 and stored.parts["trainer"].extra["optimizer_steps"] <= 1
    assert (
        stored.manifest.identity["model"] != read_checkpoint(checkpoint_of(run, 2), step=2).manifest.identity["model"]
    )
    assert all(math.isfinite(line["policy/loss"]) for line in lines_of(again, "metrics.jsonl") if "policy/loss" in line)
