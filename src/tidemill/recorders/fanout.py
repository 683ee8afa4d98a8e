"""One recorder in front of many sinks: stamps events with the step, times the step, outlives a sink that may fail.

The numbers of a step are written when the update is done, before the checkpoint is taken: a checkpoint of step N finds
the steps below N recorded, and `start(N)` makes every sink forget the rest. So no point is missing or double.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.events import Event, Learned, Memory, Metrics, Notice, PhaseDone, Transition, WeightsCompared
from tidemill.contracts.recorder import Sink, StepRecord
from tidemill.contracts.sample import Group
from tidemill.errors import CheckpointError, RecorderError, TidemillError
from tidemill.recorders.timing import StepTiming
from tidemill.rollout.metrics import rollout_metrics

__all__ = ["Fanout"]

_PATIENCE = 0.5
"""Seconds for which events of a step may wait to be written together: a step of a tenth of a second pays once."""

_WAITING = 1000
"""Events kept for the sinks until `start`; more are dropped, oldest first."""


class Fanout:
    """Implements `Recorder`. `live` sinks remember nothing (a console): they get events before `start`, too.

    The others get what happened before `start` afterwards, for only then is it known which step the run goes on at.
    One of `essential` that fails stops the run at the next call of the loop's thread; others are done without.
    """

    name = "recorder"

    def __init__(
        self,
        *,
        sinks: Sequence[Sink],
        live: Sequence[Sink] = (),
        essential: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks = [*essential, *sinks]
        self._essential = list(essential)
        self._failure: RecorderError | None = None
        self._live = list(live)
        self._clock, self._timer = clock, timer
        self._lock = threading.RLock()
        self._timing = StepTiming()
        self._step = 0
        self._started = False
        self._closed = False
        self._waiting: deque[Event] = deque(maxlen=_WAITING)
        self._pending: list[tuple[int, Event]] = []
        self._in_step = False
        self._written = 0.0
        self._saved: Mapping[str, Mapping[str, Any]] = {}

    def start(self, step: int) -> None:
        """The run goes on at `step`: sinks forget what they hold of it and later, then get the events that waited."""
        with self._lock:
            self._step, self._started = step, True
            self._each(lambda sink: sink.resume(step, self._saved.get(sink.name, {})), self._sinks + self._live)
            self._pending += [(step, event) for event in self._waiting]
            self._waiting.clear()
            self._write_pending()
        self.check()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[StepRecord]:
        """The block of step `step`. Timings are written when it is left normally."""
        with self._lock:
            if not self._started:
                self.start(step)
            self._step = step
            wall, began = self._clock(), self._timer()
            self._timing.begin(wall, threading.get_ident())
            self._in_step, self._written = True, began
        try:
            yield self._record
        except BaseException:
            self._timing.abandon()
            self._in_step = False
            self._write_pending()
            raise
        with self._lock:
            self._write_pending()  # before the clock is read: what recording costs is part of the step
            self._in_step = False
            seconds = self._timer() - began
            values = self._timing.end(seconds)
            self._write(PhaseDone(name="step", start=wall, seconds=seconds))
            self._write(Metrics(values=values))
            self._each(lambda sink: sink.end_step(step), self._sinks + self._live)
            self._step = step + 1
        self.check()

    def check(self) -> None:
        """Raises RecorderError when one of `essential` has failed, at each call."""
        if self._failure is not None:
            raise self._failure

    def emit(self, event: Event) -> None:
        """Record an event, from any thread. Never raises for a sink that fails."""
        with self._lock:
            if isinstance(event, PhaseDone):
                self._timing.add_phase(event, threading.get_ident())
            elif isinstance(event, Memory):
                self._timing.add_memory(event)
            elif isinstance(event, Transition):
                self._timing.add_transition(event)
            elif isinstance(event, WeightsCompared):
                self._timing.add_compared(event)
            self._write(event)

    def snapshot(self) -> Snapshot:
        """What each sink needs to go on: offsets and run ids."""
        states: dict[str, Mapping[str, Any]] = {}

        def ask(sink: Sink) -> None:
            states[sink.name] = dict(sink.state())

        with self._lock:
            self._write_pending()
            self._each(ask, self._sinks + self._live)
        self.check()
        return Snapshot(extra={"sinks": states})

    def load(self, saved: Saved) -> None:
        """Remember what the sinks saved, for `start`. Sinks that are new start with nothing."""
        sinks = saved.extra.get("sinks")
        if not isinstance(sinks, Mapping) or not all(isinstance(state, Mapping) for state in sinks.values()):
            raise CheckpointError(
                f"cannot resume the recorders: their saved state is {dict(saved.extra)!r}, which holds no table "
                f"'sinks' of one table a recorder; use an older checkpoint"
            )
        self._saved = sinks

    def close(self) -> None:
        """Close every sink, once."""
        with self._lock:
            if self._closed:
                return
            self._write_pending()
            self._closed = True
            self._each(lambda sink: sink.close(), self._sinks + self._live)

    def _record(self, *, groups: Sequence[Group], batch: Batch, report: StepReport) -> None:
        if groups:
            self.emit(Learned(groups=groups, batch=batch, logprobs=report.logprobs))
        values = {**rollout_metrics(groups)} if groups else {}
        values |= {"batch/rows": batch.rows, "batch/tokens": batch.tokens}
        self.emit(Metrics(values={**values, **batch.metrics, **report.metrics}))
        if report.skipped:
            self.emit(Notice(text=f"step {self._step} changed no weight: {report.skipped}", level="warning"))
        self.check()

    def _write(self, event: Event) -> None:
        if self._closed:
            return
        self._each(lambda sink: sink.write(self._step, event), self._live)
        if not self._started:
            self._waiting.append(event)
            return
        self._pending.append((self._step, event))
        if not self._in_step or self._timer() - self._written > _PATIENCE:
            self._write_pending()

    def _write_pending(self) -> None:
        """Hand the sinks what has waited; whatever asks a sink for its state does this first."""
        with self._lock:
            pending, self._pending = self._pending, []
            self._written = self._timer()
            for step, event in pending:
                self._each(lambda sink, step=step, event=event: sink.write(step, event), self._sinks)  # type: ignore[misc]
            self._each(lambda sink: sink.flush(), self._sinks)

    def _each(self, call: Callable[[Sink], None], sinks: Sequence[Sink]) -> None:
        for sink in list(sinks):
            try:
                call(sink)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        self._live = [other for other in self._live if other is not sink]
        why = f"{type(error).__name__}: {error}"
        try:
            sink.close()
        except Exception as second:
            why += f" (closing it: {type(second).__name__}: {second})"
        if any(sink is one for one in self._essential):
            self._failure = _stopping(sink, error, why)
            return
        self._write(Notice(text=f"recorder {sink.name} failed and is dropped, the run goes on: {why}", level="warning"))


def _stopping(sink: Sink, error: Exception, why: str) -> RecorderError:
    """What stops a run that would otherwise go on without what it promises to keep."""
    again = "start the same command again: it goes on from the newest checkpoint"
    if isinstance(error, TidemillError):
        failure = RecorderError(f"{error}; then {again}")
    else:
        failure = RecorderError(
            f"cannot record to {sink.name}: {why}; free the disk or make the run folder writable, and {again}"
        )
    failure.__cause__ = error
    return failure
