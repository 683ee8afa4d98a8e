"""A trainer on random weights of a real shape, and batches for it, as several benchmarks need them."""

from pathlib import Path

import numpy as np
import torch

from tidemill.contracts.batch import Batch
from tidemill.contracts.events import Emit, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.pieces import local
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.units import MIB

__all__ = ["DEADLINE", "PHASE", "make_batch", "make_trainer", "state_of"]

DEADLINE = 300.0
PHASE = PhaseSettings(
    lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, schedule="constant", warm_up_steps=0, min_ratio=1.0,
    total_steps=1000,
)  # fmt: skip


def make_trainer(model: Path, place: Place, emit: Emit = ignore) -> FsdpTrainer:
    """One rank, awake, computing in bfloat16 on a GPU."""
    return FsdpTrainer(
        model=model,
        place=place,
        compute_dtype="bfloat16" if place.device == "cuda" else "float32",
        tokens_per_micro_batch=2048,
        minibatches=1,
        recompute=True,
        max_grad_norm=1.0,
        phases={"rl": PHASE},
        page_bytes=64 * MIB,
        deadline=DEADLINE,
        emit=emit,
    )


def make_batch(step: int, words: int) -> Batch:
    """Sixteen rows of 33 to 192 tokens, the same on every rank."""
    dice = np.random.default_rng(step)
    lengths = dice.integers(33, 193, 16)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], dtype=bool)
    mask[offsets[:-1]] = False
    return Batch(
        token_ids=dice.integers(0, words, offsets[-1]),
        offsets=offsets,
        loss_mask=mask,
        logprobs=np.full(offsets[-1], -1.0, dtype=np.float32),
        advantages=np.ones(offsets[-1], dtype=np.float32),
        metrics={},
    )


def state_of(trainer: FsdpTrainer) -> list[torch.Tensor]:
    """This rank's parameters, buffers and moments on the device, which no public call hands out together."""
    trainer._memory.ready(Part.ALL)
    return [local(tensor).detach() for tensor, _ in trainer._memory._state().values()]
