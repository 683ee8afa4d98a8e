"""Episodes, scores and prompts: the seams that users touch."""

from collections.abc import Sequence
from typing import Protocol

from tidemill.contracts.engine import Generate
from tidemill.contracts.sample import Prompt, Score, Trajectory
from tidemill.contracts.state import Cursor

__all__ = ["Data", "Environment", "Reward"]


class Environment(Protocol):
    """Plays episodes."""

    def play(self, generate: Generate, prompts: Sequence[Prompt], samples: int) -> list[list[Trajectory]]:
        """`samples` unscored trajectories of each prompt, in order. A failed episode is a trajectory that says so."""
        ...


class Reward(Protocol):
    """Scores trajectories."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score for each trajectory, in order. What a user's function does wrong is a failed score, not an error.

        Raises RewardError when failures exceed the budget, or the function keeps no contract at all.
        """
        ...

    def close(self) -> None:
        """End child processes. May be called twice."""
        ...


class Data(Protocol):
    """Prompts in an order that the seed determines, endless: epochs follow each other without a gap."""

    def __len__(self) -> int:
        """Rows an epoch."""
        ...

    def take(self, cursor: Cursor, count: int) -> tuple[list[Prompt], Cursor]:
        """The next `count` prompts after `cursor`, and the cursor behind them. Pure: equal cursors, equal prompts.

        Raises DataError when the cursor's digest says that the data changed.
        """
        ...

    def all_prompts(self, limit: int = 0) -> list[Prompt]:
        """The first `limit` prompts in the order of the file, 0 for all: for evaluations."""
        ...

    def rebase(self, cursor: Cursor) -> Cursor:
        """The cursor that `take` accepts in its place, for a change of data that the user accepted. Pure.

        The cursor itself where the rows behind it are those that were consumed, else the start of the next epoch.
        """
        ...
