"""A whole step takes what was planned for it, on a CPU and on a GPU (`tidemill.planning.moments`)."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.planning.conftest import GPU, Settings
from tests.planning.test_memory_of_passes import peak_bytes

from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.app import build
from tidemill.contracts.batch import Batch
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.planning.plan import plan_of
from tidemill.residency.leaks import uncounted_bytes
from tidemill.testing.tiny import make_tiny_model
from tidemill.units import GIB

Step = Callable[[], object]


def full_batch(words: int, *, rows: int, prompt: int, new: int) -> Batch:
    """Rows as long as they may be, every token but the prompts' trained on."""
    length = prompt + new
    mask = np.tile(np.arange(length) >= prompt, rows)
    return Batch(
        token_ids=np.random.default_rng(0).integers(4, words, rows * length),
        offsets=np.arange(rows + 1) * length,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        advantages=np.ones(len(mask), np.float32),
        metrics={},
    )


def share_of_plan(
    folder: Path, settings: Settings, device: str, tokens: int, peak: Callable[[Any, Step], int]
) -> float:
    """The peak of a step of two micro-batches of `tokens`, state included, by the plan's fullest moment of one."""
    rows, side = 16, tokens // 16
    config = settings(
        folder,
        *("rollout.prompts=4", "rollout.samples=4", "residency.offload=always", "trainer.dtype=bfloat16"),
        f"trainer.tokens_per_micro_batch={tokens}",
        f"data.max_prompt_tokens={side}",
        f"rollout.sampling.max_new_tokens={side}",
    )
    plan = plan_of(config, replace(GPU, device_bytes=141 * GIB))
    steps = [moment for moment in plan.seats[0].moments if moment.name in ("forward and backward", "optimizer")]
    planned = max(moment.bytes - moment.parts["context"] for moment in steps)
    gc.collect()
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    trainer = build.build_trainer(config, Place(device=device), ignore)
    try:
        trainer.gate.open(Part.ALL)
        trainer.begin("rl")
        batch = full_batch(trainer.vocabulary, rows=rows, prompt=side, new=side)
        trainer.step(batch, CrossEntropyLoss())  # libraries allocate at the first what they keep
        return (peak(trainer, lambda: trainer.step(batch, CrossEntropyLoss())) - others) / planned
    finally:
        trainer.close()


def cpu_peak(trainer: Any, step: Step) -> int:
    return int(trainer.footprint(Part.WEIGHTS | Part.OPTIMIZER)) + peak_bytes(step)


def gpu_peak(trainer: Any, step: Step) -> int:
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() + uncounted_bytes(torch.device("cuda"))


def test_a_step_on_a_cpu_takes_what_was_planned_within_a_tenth(tmp_path: Path, settings: Settings) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=256, layers=4, heads=4, kv_heads=2)
    assert share_of_plan(folder, settings, "cpu", 1024, cpu_peak) == pytest.approx(1.0, abs=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_a_step_on_a_gpu_takes_what_was_planned_within_a_tenth(
    tmp_path: Path, settings: Settings, kv_heads: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=1024, layers=12, heads=16, kv_heads=kv_heads)
    assert share_of_plan(folder, settings, "cuda", 8192, gpu_peak) == pytest.approx(1.0, abs=0.1)
