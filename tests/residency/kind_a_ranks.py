"""Ranks of the real trainer that a test can reach into, as a worker's service."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.events import Emit
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.workers import Place
from tidemill.testing.spawned import SpawnedGroup
from tidemill.testing.suites.trainer import awake, copied, ragged_batch
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer

__all__ = ["DEADLINES", "LOSS", "RL", "ReachableService", "build", "state_of", "train", "trainer_of_ranks"]

LOSS = ClipLoss(low=0.2, high=0.2)
DEADLINES = Deadlines(work=60.0, transition=30.0, control=20.0)
RL = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=100,
)


def build(model: Path, replicas: int, place: Place, emit: Emit) -> FsdpTrainer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return FsdpTrainer(
        model=model,
        place=place,
        replicas=replicas,
        compute_dtype="float32",
        tokens_per_micro_batch=40,
        minibatches=1,
        recompute=False,
        max_grad_norm=1.0,
        phases={"rl": RL},
        page_bytes=1 << 14,
        deadline=20.0,
        emit=emit,
    )


class ReachableService(TrainerService):
    """Lets a test look at the process groups of a rank, and do to them what others do."""

    def group_names(self) -> list[str]:
        return sorted(str(name) for name in c10d._world.pg_names.values())

    def destroy_groups(self, world: bool) -> None:
        """Those of some ranks, or all: as a library does that tidies up after itself."""
        if world:
            dist.destroy_process_group()
            return
        default = c10d._get_default_group()
        for group in [group for group in c10d._world.pg_map if group is not default]:
            dist.destroy_process_group(group)

    def total_of(self, number: float) -> float:
        """A collective over all ranks."""
        value = torch.tensor(number)
        dist.all_reduce(value)
        return float(value)


def trainer_of_ranks(
    model: Path, ranks: int, *, replicas: int = 1, faults: str = "", made: list[SpawnedGroup]
) -> TrainerProxy:
    """A driver's trainer; its processes are added to `made`, for the test to end."""
    group = SpawnedGroup("trainer", ranks, fault_text=faults)
    made.append(group)
    group.build(functools.partial(ReachableService, functools.partial(build, model, replicas)), meet=ranks > 1)
    return TrainerProxy(group, deadlines=DEADLINES)


def train(trainer: Trainer, seeds: Sequence[int]) -> None:
    """One update a seed, each within a wake of its own."""
    for seed in seeds:
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(seed=seed), LOSS)


def state_of(trainer: Trainer) -> Saved:
    """All of it, from the host copy of a sleep."""
    trainer.sleep()
    snapshot: Any = trainer.snapshot()
    try:
        return copied(snapshot)
    finally:
        snapshot.release()
