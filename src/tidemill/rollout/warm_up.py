"""Demonstrations as batches: what the supervised phase learns from."""

from collections.abc import Sequence
from typing import Protocol

from tidemill.algorithms.sft import Sft
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch
from tidemill.contracts.state import Cursor

__all__ = ["NoWarmUp", "SupervisedWarmUp"]

Pair = tuple[tuple[int, ...], tuple[int, ...]]


class DemonstrationSource(Protocol):
    """Pairs of prompt and completion ids, by cursor."""

    def take(self, cursor: Cursor) -> tuple[Sequence[Pair], Cursor]:
        """The pairs of one step, and the cursor behind them."""
        ...


class SupervisedWarmUp:
    """Implements `WarmUp`: `steps` batches of demonstrations."""

    def __init__(self, *, steps: int, demonstrations: DemonstrationSource) -> None:
        self.steps = steps
        self._demonstrations = demonstrations
        self._sft = Sft()

    @property
    def loss(self) -> Loss:
        """Cross-entropy of the completions."""
        return self._sft.loss

    def batch(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        """The next demonstrations."""
        pairs, behind = self._demonstrations.take(cursor)
        return self._sft.batch(pairs), behind


class NoWarmUp:
    """Implements `WarmUp`: the run starts with reinforcement."""

    steps = 0

    @property
    def loss(self) -> Loss:
        """Never asked for."""
        return Sft().loss

    def batch(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        """An empty batch; a loop of no steps never takes it."""
        return Sft().batch([]), cursor
