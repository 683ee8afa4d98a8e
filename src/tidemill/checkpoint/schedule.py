"""Which states of a run are saved by themselves: every so many steps, where an epoch ends, and the last one."""

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.contracts.state import Cursor, RunState

__all__ = ["EpochEnds", "SaveSchedule", "no_epochs"]


@dataclass(frozen=True)
class EpochEnds:
    """Counts the epochs that a state has behind it, of prompts and of demonstrations, whose rows an epoch are given.

    0 rows have no epochs.
    """

    prompts: int
    demonstrations: int

    def __call__(self, state: RunState) -> int:
        """Whole epochs consumed, both kinds together."""
        return _finished(state.cursor, self.prompts) + _finished(state.warm_up_cursor, self.demonstrations)


def _finished(cursor: Cursor, rows: int) -> int:
    # The cursor stays behind the last row of an epoch until a row of the next one is taken.
    return cursor.epoch + (cursor.position >= rows) if rows else 0


def no_epochs(state: RunState) -> int:
    """For a run whose epochs are no reason to save."""
    return 0


class SaveSchedule:
    """Asked once after each step. `every` 0 saves at ends only; `epochs` counts those that a state has behind it.

    A step that reaches over the border of an epoch, or of several, is the one that ends it.
    """

    def __init__(self, *, every: int, last_step: int, epochs: Callable[[RunState], int] = no_epochs) -> None:
        self._every, self.last_step, self._epochs = every, last_step, epochs
        self._behind = 0

    def start(self, state: RunState) -> None:
        """The run goes on from `state`: the epochs that it has behind it ended before."""
        self._behind = self._epochs(state)

    def is_due(self, state: RunState) -> bool:
        """Whether this state is saved."""
        before, self._behind = self._behind, self._epochs(state)
        scheduled = self._every > 0 and state.step > 0 and state.step % self._every == 0
        return scheduled or state.step == self.last_step or self._behind > before
