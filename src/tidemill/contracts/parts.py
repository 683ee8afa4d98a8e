"""One of each part, fully built: what a loop is given."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tidemill.contracts.algorithm import Algorithm, Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Checkpointer
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.recorder import Recorder
from tidemill.contracts.residency import Residency
from tidemill.contracts.sample import Group, Prompt
from tidemill.contracts.state import Cursor, PolicyVersion, RunState
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.weights import WeightSync

__all__ = ["Agreement", "Evaluation", "Parts", "PromptSource", "Rollout", "StopSignal", "WarmUp"]


class PromptSource(Protocol):
    """The data, at the number of prompts that a step takes."""

    def take(self, cursor: Cursor) -> tuple[Sequence[Prompt], Cursor]:
        """The prompts of one step, and the cursor behind them."""
        ...


class Rollout(Protocol):
    """From prompts to scored groups."""

    def collect(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Group]:
        """Play, score, group. Needs the engine's lease."""
        ...


class Agreement(Protocol):
    """Whether engine and trainer give the same tokens the same log-probs. Both methods need the trainer's lease."""

    def check(self, trainer: Trainer, groups: Sequence[Group], batch: Batch, version: PolicyVersion) -> None:
        """Before the first update of a start, and cheap afterwards; the trainer holds `version`.

        Changes nothing and draws nothing. Raises EngineError when these answers must not be learned from.
        """
        ...

    def measured(self, groups: Sequence[Group], batch: Batch, report: StepReport) -> StepReport:
        """The report of the update made from `batch`, with `mismatch/*` in its metrics."""
        ...


class Evaluation(Protocol):
    """Looks at the policy between updates."""

    def if_due(self, engine: RolloutEngine, state: RunState) -> None:
        """Evaluate when the schedule says so; needs the engine's lease."""
        ...

    def final(self, engine: RolloutEngine, state: RunState) -> None:
        """Evaluate the end of the run."""
        ...


class WarmUp(Protocol):
    """Supervised steps before the first rollout."""

    @property
    def steps(self) -> int:
        """How many steps of the run are supervised; 0 for none."""
        ...

    @property
    def loss(self) -> Loss:
        """Cross-entropy."""
        ...

    def batch(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        """Demonstrations of one step."""
        ...


class StopSignal(Protocol):
    """Ctrl-C and SIGTERM, as the loop sees them."""

    def at_once(self) -> AbstractContextManager[None]:
        """Within the block a signal raises Interrupted at once; nothing that must be whole is changing there."""
        ...

    def check(self) -> None:
        """Raises Interrupted when a signal has arrived."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One of each."""

    trainer: Trainer
    engine: RolloutEngine
    residency: Residency
    weights: WeightSync
    checkpointer: Checkpointer
    data: PromptSource
    rollout: Rollout
    algorithm: Algorithm
    agreement: Agreement
    warm_up: WarmUp
    evaluation: Evaluation
    recorder: Recorder
    stop: StopSignal
    fresh_state: Callable[[], RunState]
