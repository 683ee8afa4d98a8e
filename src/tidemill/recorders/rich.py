"""The console: one line a step that a person understands, with or without a terminal.

A terminal gets progress bars besides. Anything else (a file, a pipe, a CI log) gets the same lines as plain text with
no control code in them. Text that others wrote is shown with control characters escaped and markup as it stands.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tidemill.contracts.events import (
    CheckpointEvent,
    Evaluated,
    Event,
    Metrics,
    Notice,
    Progress,
)
from tidemill.recorders.bars import Bars, NoBars
from tidemill.recorders.sentences import checkpoint_line, evaluation_line, step_line
from tidemill.recorders.text import one_line, visible

__all__ = ["RichSink"]


class RichSink:
    """Implements `Sink`. Lines of steps are at most one in `pause` seconds, but none with news is left out.

    News are a step's being the first or last of a phase, a checkpoint, an evaluation.
    """

    name = "rich"

    def __init__(
        self,
        *,
        steps: int,
        warm_up_steps: int,
        stream: TextIO,
        pause: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._warm_up = steps, warm_up_steps
        self._stream, self._pause, self._clock = stream, pause, clock
        self._bars: Bars | NoBars = Bars(stream) if stream.isatty() else NoBars(stream)
        self._values: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._checkpoint = ""
        self._shown = float("-inf")

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Remember the last evaluation, so that the next line can say what it was."""
        self._evaluated = dict(state.get("evaluated", {}))
        if step:
            self._print(f"going on at step {step}")

    def write(self, step: int, event: Event) -> None:
        """Show what has to be shown at once, keep the rest for the step's line."""
        match event:
            case Metrics():
                self._values.update(event.values)
            case Evaluated():
                self._print(evaluation_line(step, event.values, self._evaluated))
                self._evaluated = dict(event.values)
            case CheckpointEvent(status="durable"):
                self._checkpoint = checkpoint_line(event)
            case CheckpointEvent(status="failed"):
                self._print("warning: " + checkpoint_line(event), style="yellow")
            case Notice(level="warning"):
                self._print("warning: " + event.text, style="yellow")
            case Notice():
                self._print(event.text)
            case Progress():
                self._bars.show(one_line(event.what), event.done, event.total)

    def flush(self) -> None:
        """Nothing: the console is not buffered."""

    def end_step(self, step: int) -> None:
        """Print the step's line, unless one was printed just now and this one holds no news."""
        values, self._values = self._values, {}
        self._bars.clear()
        warm = step < self._warm_up
        last = step + 1 in (self._warm_up, self._steps)
        now = self._clock()
        if not (last or self._checkpoint or step in (0, self._warm_up) or now - self._shown >= self._pause):
            return
        self._shown = now
        head = f"warm-up {step + 1}/{self._warm_up}" if warm else f"step {step + 1}/{self._steps}"
        self._print(step_line(head, values, self._checkpoint))
        self._checkpoint = ""

    def state(self) -> Mapping[str, Any]:
        """The last evaluation."""
        return {"evaluated": {name: value for name, value in self._evaluated.items() if value == value}}

    def close(self) -> None:
        """Say what became durable after the last step, and leave the terminal as it was."""
        if self._checkpoint:
            self._print(self._checkpoint)
            self._checkpoint = ""
        self._bars.close()

    def _print(self, text: str, style: str = "") -> None:
        encoding = self._stream.encoding or "utf-8"
        self._bars.print(visible(text).encode(encoding, "backslashreplace").decode(encoding), style)
