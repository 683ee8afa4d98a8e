"""`tidemill.trainers.fsdp.memory`: what is counted when a sleep fails, and what is the process's own on its device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.trainers.fsdp.conftest import MakeFsdpTrainer

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.errors import DataError, ResidencyError
from tidemill.residency import residue
from tidemill.trainers.fsdp.trainer import FsdpTrainer

PAGE = 1 << 13  # so that it lies in several slabs
HELD = Part.WEIGHTS | Part.OPTIMIZER | Part.GRADS


def sleep(trainer: FsdpTrainer) -> None:
    trainer.sleep()


def leave(trainer: FsdpTrainer) -> None:
    for _ in trainer.leave():
        pass


@pytest.mark.parametrize("go", [sleep, leave])
def test_a_sleep_that_ends_asleep_by_its_failure_counts_no_gradients(
    make_fsdp_trainer: MakeFsdpTrainer, go: Callable[[FsdpTrainer], None]
) -> None:
    trainer = make_fsdp_trainer(page_bytes=PAGE)
    with (
        faults.armed("residency.release.slab=raise@3,residency.restore.slab=raise@1"),
        pytest.raises((ResidencyError, faults.FaultInjected)) as caught,
    ):
        go(trainer)
    assert trainer.resident() == Part.NONE, caught.value
    trainer.wake_up(Part.ALL)
    assert trainer.resident() == HELD


@pytest.mark.parametrize("go", [sleep, leave])
def test_a_sleep_that_fails_and_ends_awake_keeps_the_room_of_gradients(
    make_fsdp_trainer: MakeFsdpTrainer, go: Callable[[FsdpTrainer], None]
) -> None:
    trainer = make_fsdp_trainer(page_bytes=PAGE)
    with (
        faults.armed("residency.release.slab=raise@3"),
        pytest.raises((ResidencyError, faults.FaultInjected)),
    ):
        go(trainer)
    assert trainer.resident() == HELD


def test_what_the_process_holds_on_its_device_is_noted_before_a_model_is_loaded(
    make_fsdp_trainer: MakeFsdpTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residue, "_known", {})
    with pytest.raises(DataError, match=str(tmp_path)):
        make_fsdp_trainer(model=tmp_path / "none")
    assert torch.device("cpu") in residue._known
