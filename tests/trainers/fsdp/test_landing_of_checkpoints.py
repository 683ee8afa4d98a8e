"""A trainer alone takes a checkpoint into its host pages while it is verified (`FsdpTrainer.landing`)."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainers.fsdp.conftest import MakeFsdpTrainer

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.stored_tensor import StoredTensor
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.events import ignore
from tidemill.contracts.landing import Landable
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError
from tidemill.residency.manager import LeaseManager
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.testing.suites.trainer_case import awake, copied, ragged_batch, same
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.units import GIB

CLIP = ClipLoss(low=0.2, high=0.2)


class Run:
    """A trainer with its checkpoints and leases."""

    def __init__(self, folder: Path, trainer: FsdpTrainer) -> None:
        self.trainer = trainer
        self.residency = LeaseManager(budget=GIB, emit=ignore, deadline=20.0)
        self.residency.admit(trainer)
        self.manager = CheckpointManager(
            folder=folder,
            stateful=[trainer],
            trainer=trainer,
            residency=self.residency,
            every=1,
            last_step=9,
            mode="sync",
            keep_last=9,
            keep_every=0,
            on_failure="stop",
            walk_back=True,
            accept=(),
            identity={},
            settings={},
            attempt=1,
            seed=0,
            grace=20.0,
            emit=ignore,
        )

    def steps(self, count: int) -> list[Saved]:
        """What was saved at each."""
        found = []
        with self.residency.awake(self.trainer):
            self.trainer.begin("rl")
            for step in range(1, count + 1):
                self.trainer.step(ragged_batch(seed=step), CLIP)
                state = RunState(step=step, attempt=1, seed=0, cursor=Cursor(position=step), warm_up_cursor=Cursor())
                self.manager.save_if_due(state)
                found.append(copied(self.trainer.snapshot()))
        return found

    def restored(self) -> tuple[int, Saved]:
        """Step and state."""
        with self.residency.awake(self.trainer):
            state = self.manager.restore()
            assert state is not None
            return state.step, copied(self.trainer.snapshot())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what is read of stored tensors after their verification."""
    shapes: list[tuple[int, ...]] = []
    reading = StoredTensor.read
    monkeypatch.setattr(
        StoredTensor, "read", lambda self, offset, shape: (shapes.append(shape), reading(self, offset, shape))[1]
    )
    return shapes


def test_a_start_reads_a_checkpoint_once_and_has_its_host_copy_then(
    tmp_path: Path, make_fsdp_trainer: MakeFsdpTrainer, read: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = Run(tmp_path, make_fsdp_trainer()).steps(2)
    monkeypatch.setattr(HostArenaSaver, "begin_capture", None)
    run = Run(tmp_path, make_fsdp_trainer())
    step, found = run.restored()
    assert step == 2 and same(found, last) and not read
    assert run.trainer.sleep().copied == 0
    with awake(run.trainer):
        assert same(copied(run.trainer.snapshot()), last)


def test_damage_that_has_landed_is_never_loaded_and_the_checkpoint_before_it_is(
    tmp_path: Path, make_fsdp_trainer: MakeFsdpTrainer, read: list[tuple[int, ...]]
) -> None:
    first, _ = Run(tmp_path, make_fsdp_trainer()).steps(2)
    (path,) = (tmp_path / "step-00000002").glob("trainer-*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    step, found = Run(tmp_path, make_fsdp_trainer()).restored()
    assert step == 1 and same(found, first) and not read
    assert (tmp_path / "step-00000002.aside-1").is_dir()


def test_when_nothing_is_whole_the_trainer_is_as_it_was(tmp_path: Path, make_fsdp_trainer: MakeFsdpTrainer) -> None:
    Run(tmp_path, make_fsdp_trainer()).steps(1)
    (path,) = (tmp_path / "step-00000001").glob("trainer-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    run = Run(tmp_path, make_fsdp_trainer())
    with awake(run.trainer):
        before = copied(run.trainer.snapshot())
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is whole"):
        run.restored()
    run.trainer.sleep()
    with awake(run.trainer):
        assert same(copied(run.trainer.snapshot()), before)


def test_moments_that_landed_do_not_count_where_others_begin_afresh(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer, twin = make_fsdp_trainer(), make_fsdp_trainer()
    with awake(twin):
        twin.begin("rl")
        twin.step(ragged_batch(), CLIP)
        saved = copied(twin.snapshot())
    moments = [name for name in saved.tensors if name.startswith("optimizer/")]
    rest = {name: tensor for name, tensor in saved.tensors.items() if name != moments[0]}
    with awake(trainer):
        assert isinstance(trainer, Landable)
        landing = trainer.landing()
        for name, tensor in rest.items():
            landing.land(name, 0, tensor.data)
        trainer.load(replace(saved, tensors=rest, accept=("optimizer",), landing=landing))
        found = copied(trainer.snapshot())
    assert all(not any(bytes(found.tensors[name].data)) for name in moments)
    assert all(
        bytes(found.tensors[name].data) == bytes(tensor.data) for name, tensor in rest.items() if name not in moments
    )
