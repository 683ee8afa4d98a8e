"""A trainer whose memory is on its way when it begins to compute (`tidemill.trainers.fsdp.arriving`)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.residency.savers.late import LateTransfer

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Swappable
from tidemill.errors import ResidencyError
from tidemill.residency.savers import host_arena
from tidemill.testing.suites.trainer import MakeTrainer, TrainerSuite, awake, copied, ragged_batch, same
from tidemill.trainers.fsdp.trainer import FsdpTrainer

MakeFsdpTrainer = Callable[..., FsdpTrainer]
CLIP = ClipLoss(low=0.2, high=0.2)
PAGE = 1 << 13  # so that every layer lies in several slabs


class LateBus:
    """The transfers of all trainers made with it."""

    def __init__(self) -> None:
        self.made: list[LateTransfer] = []

    def __call__(self, device: torch.device) -> LateTransfer:
        self.made.append(LateTransfer())
        return self.made[-1]


@pytest.fixture
def make_late(make_fsdp_trainer: MakeFsdpTrainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFsdpTrainer]:
    """A trainer whose bytes come late, and until then are no numbers."""

    def make(**changes: object) -> FsdpTrainer:
        with monkeypatch.context() as patch:
            patch.setattr(host_arena, "transfer_for", LateBus())
            return make_fsdp_trainer(page_bytes=PAGE, **changes)

    yield make


def late(trainer: FsdpTrainer, seconds: float) -> None:
    trainer._memory._saver._transfer.seconds = seconds  # type: ignore[attr-defined]


class TestFsdpTrainerOnALateBus(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, make_late: MakeFsdpTrainer) -> MakeTrainer:
        return make_late

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_that_begins_before_the_weights_are_there_has_the_bits_of_one_that_slept_never(
    make_late: MakeFsdpTrainer,
    make_fsdp_trainer: MakeFsdpTrainer,
    tiny_models: Callable[..., Path],
    recompute: bool,
    tied: bool,
) -> None:
    words = {"model": tiny_models("qwen3", tied), "recompute": recompute, "minibatches": 2}
    sleeper, twin = make_late(**words), make_fsdp_trainer(**words)
    late(sleeper, 0.002)
    for trainer in (sleeper, twin):
        with awake(trainer):
            trainer.begin("rl")
    for seed in range(4):
        sleeper.sleep()
        with awake(sleeper), awake(twin):
            batch = ragged_batch(seed=seed)
            if seed % 2:
                assert np.array_equal(sleeper.log_probs(batch), twin.log_probs(batch))
            reports = [trainer.step(batch, CLIP).metrics for trainer in (sleeper, twin)]
            assert reports[0] == reports[1]
    with awake(sleeper), awake(twin):
        held = [trainer.snapshot() for trainer in (sleeper, twin)]
    assert same(copied(held[0]), copied(held[1]))


def test_the_first_layer_computes_while_the_last_is_on_its_way_and_the_moments_too(make_late: MakeFsdpTrainer) -> None:
    trainer = make_late()
    crossing = trainer._memory._saver._crossing
    left: list[int] = []
    for layer in trainer._network.get_decoder().layers:
        layer.register_forward_pre_hook(lambda *_: left.append(len(crossing._arriving)))
    with awake(trainer):
        trainer.begin("rl")
    trainer.sleep()
    late(trainer, 0.02)
    with awake(trainer):
        trainer.step(ragged_batch(rows=2), CLIP)
        assert not crossing.arriving
    moments = sum(slab.part == Part.OPTIMIZER for slab in crossing.slabs)
    assert left[0] > left[1] >= moments > 0


def test_weights_are_handed_out_and_phases_begun_when_they_are_there(make_late: MakeFsdpTrainer) -> None:
    trainer = make_late()
    with awake(trainer):
        wanted = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    trainer.sleep()
    late(trainer, 0.005)
    with awake(trainer):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in trainer.named_weights())
    trainer.sleep()
    with awake(trainer):
        trainer.begin("rl")
        assert not any(tensor.any() for tensor in trainer._optimizer.state().values())


def drained(pieces: object) -> tuple[list[int], Moved]:
    seen: list[int] = []
    while True:
        try:
            seen.append(next(pieces))  # type: ignore[call-overload]
        except StopIteration as end:
            return seen, end.value


def test_a_trainer_leaves_and_arrives_in_pieces_with_its_gradients_counted(make_late: MakeFsdpTrainer) -> None:
    trainer = make_late()
    assert isinstance(trainer, Swappable)
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
        before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    freed, moved = drained(trainer.leave())
    assert sum(freed) == trainer.footprint(Part.ALL) and moved.copied == trainer._memory._saver.device_bytes(Part.ALL)
    assert trainer.resident() == Part.NONE
    taken, moved = drained(trainer.arrive(Part.ALL))
    assert taken.pop() == 0 and 0 not in taken
    assert sum(taken) == trainer.footprint(Part.ALL) and moved.copied > 0
    assert trainer.resident() == Part.WEIGHTS | Part.OPTIMIZER | Part.GRADS
    with awake(trainer):
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_weights())


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_trainer_that_is_stopped_on_its_way_is_as_before(make_late: MakeFsdpTrainer, pieces: int) -> None:
    trainer = make_late()
    whole = trainer.resident()
    leaving = trainer.leave()
    for _ in range(pieces):
        next(leaving)
    leaving.close()
    assert trainer.resident() == whole
    trainer.sleep()
    arriving = trainer.arrive(Part.ALL)
    for _ in range(pieces):
        next(arriving)
    arriving.close()
    assert trainer.resident() == Part.NONE


def test_a_trainer_does_not_leave_in_the_middle_of_a_step(make_late: MakeFsdpTrainer) -> None:
    trainer = make_late()

    def loss(inputs: object) -> object:
        trainer.leave()
        raise AssertionError

    with awake(trainer):
        trainer.begin("rl")
        with pytest.raises(ResidencyError, match="a step is under way"):
            trainer.step(ragged_batch(), loss)  # type: ignore[arg-type]
