"""Real runs in the test's own process, stopped where a test wants them to stop and started again."""

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.crash.small_run import recipe

from tidemill.algorithms.grpo import Grpo
from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.checkpoint.catalog import entries, problems_of
from tidemill.cli.main import main
from tidemill.config.algorithm import AlgorithmSettings
from tidemill.config.environment import EnvironmentSettings
from tidemill.contracts.algorithm import LossInputs, LossOutput
from tidemill.contracts.engine import Generate
from tidemill.contracts.sample import Group, Prompt, Trajectory
from tidemill.environments.single_turn import SingleTurn
from tidemill.faults import armed
from tidemill.rollout.dump import read_dump

__all__ = [
    "CHANCE",
    "QUICK",
    "RANKS",
    "SHORT",
    "STOPPED",
    "Dice",
    "DiceSettings",
    "Moody",
    "MoodySettings",
    "checkpoint_of",
    "curves_of",
    "groups_of",
    "lines_of",
    "notices",
    "rows_of",
    "started",
    "steps_of",
    "whole_steps",
]

RANKS = (
    "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings",
    "trainer.ranks=2",
    "residency.park_groups=always",
)
CHANCE = (
    "environment.use=tests.checkpoint.real_runs:DiceSettings",
    "algorithm.use=tests.checkpoint.real_runs:MoodySettings",
)
"""Answers are changed at random in the driver, and losses wherever they are computed."""
STOPPED = 143
"""Exit code of a start that the fault action `stop` ended."""
QUICK = (
    "warm_up.steps=0",
    "rollout.samples=2",
    "rollout.sampling.max_new_tokens=3",
    "checkpoint.export=false",
    "eval.limit=1",
)
"""Words of a run of tenths of a second, in which every step is a rollout of three prompts."""
SHORT = ("steps=2", *QUICK, "checkpoint.export=true")
"""Two steps of it, exported."""


class DiceSettings(EnvironmentSettings):
    """Answers that chance changes."""

    implementation: ClassVar[str] = "tests.checkpoint.real_runs:Dice"


class Dice(SingleTurn):
    """Turns an answer round, or cuts it, as the generators of python, numpy and torch have it: rewards follow."""

    def play(self, generate: Generate, prompts: Sequence[Prompt], samples: int) -> list[list[Trajectory]]:
        """See Environment."""
        return [[_changed(one) for one in group] for group in super().play(generate, prompts, samples)]


def _changed(answer: Trajectory) -> Trajectory:
    text = answer.text
    if random.random() < 0.5:
        text = text[::-1]
    if np.random.random() < 0.5:
        text = text[1:]
    if torch.rand(()).item() < 0.5:
        text = text[:-1]
    return replace(answer, text=text)


class MoodySettings(AlgorithmSettings):
    """A loss that chance weighs."""

    implementation: ClassVar[str] = "tests.checkpoint.real_runs:Moody"
    least_samples: ClassVar[int] = 2


class Moody(Grpo):
    """As Grpo."""

    def __init__(self, *, temperature: float) -> None:
        super().__init__(clip_low=0.2, clip_high=0.2, normalize_std=True, temperature=temperature)

    @property
    def loss(self) -> "MoodyLoss":
        """See Algorithm."""
        return MoodyLoss(low=0.2, high=0.2)


class MoodyLoss(ClipLoss):
    """Each micro-batch counts as much as the generators of python, numpy and torch have it."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """See Loss; it is not pure."""
        found = super().__call__(inputs)
        weight = 0.5 + random.random() + np.random.random() + torch.rand(()).item()
        return replace(found, numerator=found.numerator * weight)


def started(base: Path, run: Path, *words: str, faults: str = "") -> int:
    """One start of the small run in the folder `run`, with `faults` armed in it; its exit code."""
    with armed(faults) if faults else nullcontext():
        return main(["run", str(recipe(base, run)), *words, "--quiet"])


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of one of its JSONL files."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What must be equal in runs that are: metrics and evaluations."""
    return [line for line in lines_of(run, "metrics.jsonl") if line["kind"] in ("metrics", "eval")]


def steps_of(run: Path) -> list[int]:
    """The steps of its metrics, in the order of the file."""
    return [line["step"] for line in lines_of(run, "metrics.jsonl") if line["kind"] == "metrics"]


def groups_of(run: Path, step: int) -> tuple[Group, ...]:
    """What was rolled out in a step, as it was dumped."""
    return read_dump(run / "rollouts" / f"step-{step:08d}.jsonl").groups


def curves_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw of numbers that do not depend on the clock."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    stable = {name for line in rows_of(run) for name in line}
    names = [name for name in reader.Tags()["scalars"] if name in stable]
    assert len(names) > 10
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in names}


def whole_steps(run: Path) -> list[int]:
    """The steps of its checkpoints, each of which must hold."""
    found = entries(run / "checkpoints")
    assert [problems_of(entry)[1] for entry in found] == [""] * len(found)
    return [entry.step for entry in found]


def notices(run: Path) -> list[str]:
    """All that was told."""
    return [line["text"] for line in lines_of(run, "events.jsonl") if line["kind"] == "notice"]


def checkpoint_of(run: Path, step: int) -> Path:
    """Its folder."""
    return run / "checkpoints" / f"step-{step:08d}"
