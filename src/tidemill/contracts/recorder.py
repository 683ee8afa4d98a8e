"""Where events go."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Stateful
from tidemill.contracts.events import Event
from tidemill.contracts.sample import Group

__all__ = ["Recorder", "Sink", "StepRecord"]


class StepRecord(Protocol):
    """What a loop calls once a step, when the update is done and before it is saved."""

    def __call__(self, *, groups: Sequence[Group], batch: Batch, report: StepReport) -> None:
        """Record the numbers of the step that a resumed run would reproduce."""
        ...


class Recorder(Stateful, Protocol):
    """Receives events from any thread; asked for nothing but its own state."""

    def step(self, step: int) -> AbstractContextManager[StepRecord]:
        """The block in which step number `step` (from 0) happens; events within it carry that number.

        Recording the step, leaving the block, `start` and `snapshot` raise RecorderError when a sink that the run
        promises to keep has failed: what is not recorded is not saved either, so it is done and recorded again.
        """
        ...

    def start(self, step: int) -> None:
        """The run goes on at `step`, restored or fresh: what earlier starts recorded of it and later is dropped."""
        ...

    def emit(self, event: Event) -> None:
        """Record an event. Never raises for a sink that fails: that sink is dropped with a notice."""
        ...

    def close(self) -> None:
        """Flush and close every sink. May be called twice."""
        ...


class Sink(Protocol):
    """One place that keeps or shows events: a console, a file, TensorBoard."""

    @property
    def name(self) -> str:
        """As in settings."""
        ...

    def write(self, step: int, event: Event) -> None:
        """Take an event of a step. Called under the recorder's lock."""
        ...

    def flush(self) -> None:
        """Hand what was written to the operating system, so that a killed process loses none of it."""
        ...

    def end_step(self, step: int) -> None:
        """The step's block was left normally; every event of it but those of background work has been written."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON values that `resume` will be given: offsets, run ids. What was written so far is flushed and fsynced."""
        ...

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: forget everything recorded of step `step` and later. `state` may be empty."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
