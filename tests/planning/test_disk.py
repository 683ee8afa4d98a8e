"""What a run writes to its disk (`tidemill.planning.disk`)."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.conftest import CPU, Settings

from tidemill.app import build
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.planning.plan import plan_of
from tidemill.planning.verdict import problems
from tidemill.testing.tiny import make_tiny_model
from tidemill.units import GIB


def test_a_checkpoint_is_as_large_as_the_trainers_state_will_be(tmp_path: Path, settings: Settings) -> None:
    config = settings(make_tiny_model(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2))
    trainer = build.build_trainer(config, Place(device="cpu"), ignore)
    try:
        trainer.gate.open(Part.ALL)
        snapshot = trainer.snapshot()
        written = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        snapshot.release()
    finally:
        trainer.close()
    assert plan_of(config, CPU).disk.checkpoint == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize(("dtype", "each"), [("auto", 4), ("bfloat16", 2), ("float32", 4)])
def test_an_export_is_counted_in_its_own_precision(dtype: str, each: int, tmp_path: Path, settings: Settings) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2)
    plan = plan_of(settings(model, f"checkpoint.export_dtype={dtype}", "checkpoint.keep_last=3"), CPU)
    assert plan.disk.export == each * plan.model.parameters
    assert plan.disk.needed == 4 * plan.disk.checkpoint + plan.disk.export
    assert plan_of(settings(model, "checkpoint.export=false"), CPU).disk.export == 0
    assert plan_of(settings(model, "checkpoint.keep_best=reward/mean"), CPU).disk.at_once == 4


def test_people_read_how_long_a_rollout_must_be_for_a_save_to_cost_nothing(tmp_path: Path, settings: Settings) -> None:
    plan = plan_of(settings(make_tiny_model(tmp_path / "model")), CPU)
    disk = replace(plan.disk, checkpoint=8 * GIB, export=GIB, free=100 * GIB)
    assert disk.sentence() == (
        "disk: a checkpoint takes 8.0 GiB, 3 of them at once 24.0 GiB, and an export 1.0 GiB; 100.0 GiB are free; a "
        "save stays behind a rollout that lasts as long as it is written: 8.0 s at 1 GiB/s, 2.0 s at 4 GiB/s"
    )


def test_a_disk_without_room_for_one_checkpoint_is_told_of_before_anything_starts(
    tmp_path: Path, settings: Settings
) -> None:
    config = settings(make_tiny_model(tmp_path / "model"))
    plan = plan_of(config, CPU)
    assert problems(plan, config) == []
    full = replace(plan, disk=replace(plan.disk, free=plan.disk.checkpoint - 1))
    assert any("cannot save a checkpoint" in problem and "run.dir" in problem for problem in problems(full, config))
    unknown = replace(plan, disk=replace(plan.disk, free=None))
    assert problems(unknown, config) == []
