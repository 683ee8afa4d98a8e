"""What every checkpointer must do. Subclass `CheckpointerSuite` and give it one start of a run after another."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tidemill.contracts.checkpoint import Checkpointer
from tidemill.contracts.state import Cursor, RunState

__all__ = ["CheckpointerSuite", "Start"]


@dataclass(frozen=True)
class Start:
    """One start of a run of 5 steps that saves every second: `attempt` is its number.

    `train` changes the part that is saved, `read` says what state it is in: equal texts, equal states.
    """

    checkpointer: Checkpointer
    attempt: int
    train: Callable[[], None]
    read: Callable[[], str]


class CheckpointerSuite:
    """Override the fixture `start`."""

    @pytest.fixture
    def start(self) -> Callable[[], Start]:
        """Begin the run, or go on with it: each call is a new process's, with fresh parts and a higher attempt."""
        raise NotImplementedError("override the fixture `start`")

    @staticmethod
    def run(start: Start, state: RunState, to: int) -> RunState:
        """Train and save as a loop does."""
        while state.step < to:
            start.train()
            state = state.advance(cursor=Cursor(position=state.step + 1))
            start.checkpointer.save_if_due(state)
        return state

    @staticmethod
    def fresh(start: Start) -> RunState:
        """The state at step 0."""
        return RunState(step=0, attempt=start.attempt, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())

    def test_nothing_saved_is_nothing_restored(self, start: Callable[[], Start]) -> None:
        assert start().checkpointer.restore() is None

    def test_the_newest_due_state_comes_back_whole_with_the_new_attempt(self, start: Callable[[], Start]) -> None:
        first = start()
        first.checkpointer.restore()
        wanted = self.run(first, self.fresh(first), 2)
        read = first.read()
        self.run(first, wanted, 3)
        first.checkpointer.drain()
        second = start()
        state = second.checkpointer.restore()
        assert state is not None and second.read() == read
        assert (state.step, state.cursor, state.attempt) == (2, wanted.cursor, second.attempt)
        assert state.policy_version > wanted.policy_version

    def test_the_last_step_is_saved_whatever_the_interval(self, start: Callable[[], Start]) -> None:
        first = start()
        first.checkpointer.restore()
        self.run(first, self.fresh(first), 5)
        first.checkpointer.drain()
        state = start().checkpointer.restore()
        assert state is not None and state.step == 5

    def test_any_state_can_be_saved_and_saving_it_twice_is_once(self, start: Callable[[], Start]) -> None:
        first = start()
        first.checkpointer.restore()
        state = self.run(first, self.fresh(first), 3)
        for _ in range(2):
            first.checkpointer.save(state)
            first.checkpointer.drain()
        second = start()
        restored = second.checkpointer.restore()
        assert restored is not None and restored.step == 3 and second.read() == first.read()
        second.checkpointer.save(restored)
        second.checkpointer.drain()

    def test_a_run_that_goes_on_saves_on(self, start: Callable[[], Start]) -> None:
        for _ in range(2):
            going = start()
            state = going.checkpointer.restore() or self.fresh(going)
            self.run(going, state, state.step + 2)
            going.checkpointer.drain()
        last = start()
        restored = last.checkpointer.restore()
        assert restored is not None and restored.step == 4 and last.read() == going.read()

    def test_drain_with_nothing_to_wait_for_returns(self, start: Callable[[], Start]) -> None:
        first = start()
        first.checkpointer.drain()
        first.checkpointer.drain()
