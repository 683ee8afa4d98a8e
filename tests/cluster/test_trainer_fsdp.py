"""tidemill.cluster.trainer_proxy over two ranks of the real trainer, by the public suite."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.events import Emit, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.workers import Place
from tidemill.errors import TidemillError
from tidemill.testing.suites.trainer import MakeTrainer, TrainerSuite, awake, copied, ragged_batch, same
from tidemill.testing.tiny import make_tiny_model
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer

CLIP = ClipLoss(low=0.2, high=0.2)
PHASE = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=10,
)


def build(model: Path, place: Place, emit: Emit) -> FsdpTrainer:
    return FsdpTrainer(
        model=model,
        place=place,
        compute_dtype="float32",
        tokens_per_micro_batch=40,
        minibatches=2,
        recompute=False,
        max_grad_norm=1.0,
        phases={"warm_up": PHASE, "rl": PHASE},
        page_bytes=1 << 16,
        spare_bytes=1 << 22,
        deadline=30.0,
        emit=emit,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), family="qwen3", tied=True, hidden=16, heads=2, kv_heads=1)


class TestTwoRanks(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, two_ranks: Any, model: Path) -> MakeTrainer:
        return lambda: two_ranks(functools.partial(build, model))  # type: ignore[no-any-return]

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


def trained(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(seed=seed), CLIP)


def test_two_ranks_train_as_one_does_to_rounding(two_ranks: Any, model: Path) -> None:
    alone, trainer = build(model, Place(), ignore), two_ranks(functools.partial(build, model))
    reports = []
    for one in (alone, trainer):
        trained(one, range(2))
        with awake(one):
            reports.append(one.step(ragged_batch(seed=2), CLIP).metrics)
    with awake(alone), awake(trainer):
        wanted = {name: tensor.clone().numpy() for name, tensor in alone.named_weights()}
        found = {name: tensor.numpy() for name, tensor in trainer.named_weights()}
        assert np.allclose(alone.log_probs(ragged_batch()), trainer.log_probs(ragged_batch()), atol=1e-4)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.allclose(found[name], tensor, atol=2e-4), name
    assert reports[0].keys() == reports[1].keys()
    for name in ("policy/grad_norm", "train/tokens", "policy/lr"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-3)


def test_one_rank_in_a_process_of_its_own_is_bit_for_bit_the_trainer_itself(model: Path, one_rank: Any) -> None:
    alone, trainer = build(model, Place(), ignore), one_rank(functools.partial(build, model))
    states = []
    for one in (alone, trainer):
        trained(one, range(2))
        one.sleep()
        assert one.wake_up(Part.ALL).beside > 0, "what is told of a wake is told of a worker's too"
        one.sleep()
        snapshot = one.snapshot()
        state = copied(snapshot)
        states.append({name: bytes(tensor.data) for name, tensor in state.tensors.items()})
        snapshot.release()
    assert states[0] == states[1]


def test_a_state_of_two_ranks_goes_on_in_one_process_and_back(two_ranks: Any, model: Path) -> None:
    alone, trainer = build(model, Place(), ignore), two_ranks(functools.partial(build, model))
    trained(trainer, range(2))
    trainer.sleep()
    snapshot = trainer.snapshot()
    state = copied(snapshot)
    snapshot.release()
    with awake(alone):
        alone.load(state)
    alone.sleep()
    again = copied(alone.snapshot())
    assert {name: bytes(t.data) for name, t in again.tensors.items()} == {
        name: bytes(t.data) for name, t in state.tensors.items()
    }
    trained(trainer, range(5, 6))
    with awake(trainer):
        trainer.load(state)
    trainer.sleep()
    back = trainer.snapshot()
    assert same(copied(back), state)
    back.release()


@pytest.mark.parametrize("point", ["residency.capture.slab", "residency.release.slab", "residency.restore.slab"])
def test_a_rank_whose_memory_cannot_move_once_leaves_a_trainer_that_goes_on_bit_for_bit(
    two_ranks: Any, model: Path, point: str
) -> None:
    shaky, steady = (
        two_ranks(functools.partial(build, model), faults=faults) for faults in (f"trainer-1/{point}=raise", "")
    )
    states = []
    for trainer in (shaky, steady):
        failures = 0
        for seed in range(3):
            trained(trainer, range(seed, seed + 1))
            for move in (trainer.sleep, lambda trainer=trainer: trainer.wake_up(Part.ALL)):
                try:
                    move()
                except TidemillError as error:
                    failures += 1
                    assert "in trainer-1" in "".join(error.__notes__)
                    move()
        assert failures == (trainer is shaky)
        snapshot = trainer.snapshot()
        states.append(copied(snapshot))
        snapshot.release()
    assert same(*states)


def test_a_footprint_is_that_of_the_fuller_rank(two_ranks: Any, model: Path) -> None:
    alone, trainer = build(model, Place(), ignore), two_ranks(functools.partial(build, model))
    whole, half = alone.footprint(Part.WEIGHTS), trainer.footprint(Part.WEIGHTS)
    assert whole / 2 <= half < whole
