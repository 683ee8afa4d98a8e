"""What a resume does when the data or the seed changed and the change was accepted.

The rule: where the rows behind the cursor are no longer those that were consumed, the run goes on at the start of the
next epoch, under the new order. So no sample id is used twice; what was left of the former epoch is skipped.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.state import Cursor, RunState

__all__ = ["AcceptedChanges", "Rebase", "as_it_is"]

Rebase = Callable[[Cursor], Cursor]


def as_it_is(cursor: Cursor) -> Cursor:
    """The cursor, where nothing reads by it."""
    return cursor


@dataclass(frozen=True, kw_only=True)
class AcceptedChanges:
    """Turns a restored state into one that the present data can go on from, as far as `accept` names what changed.

    `prompts` and `demonstrations` are `Data.rebase`. What is not accepted stays: the data then refuses its cursor.
    """

    accept: Collection[str]
    prompts: Rebase
    demonstrations: Rebase
    warm_up_steps: int
    emit: Emit

    def __call__(self, state: RunState) -> RunState:
        """The state, with cursors that fit; a warning says what is skipped and what comes again."""
        state = replace(state, cursor=self._fitting(state, "data", state.cursor, self.prompts))
        if state.step >= self.warm_up_steps:
            return state
        cursor = self._fitting(state, "warm_up", state.warm_up_cursor, self.demonstrations)
        return replace(state, warm_up_cursor=cursor)

    def _fitting(self, state: RunState, name: str, cursor: Cursor, rebase: Rebase) -> Cursor:
        accepted = sorted({name, "seed"}.intersection(self.accept))
        if not accepted:
            return cursor
        found = rebase(cursor)
        if found != cursor:
            self.emit(
                Notice(
                    text=f"step {state.step} is where the order of the rows changes (checkpoint.accept has "
                    f"{' and '.join(accepted)}; {name}): it begins epoch {found.epoch} of the new order; what was left "
                    f"of epoch {cursor.epoch} is skipped, and its {cursor.position} rows that were learned from may "
                    "come again",
                    level="warning",
                )
            )
        return found
