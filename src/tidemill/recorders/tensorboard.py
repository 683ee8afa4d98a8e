"""Scalars for TensorBoard. A resumed run writes a mark at which TensorBoard drops what was recorded of later steps."""

import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.contracts.events import Evaluated, Event, Metrics
from tidemill.errors import PluginError

__all__ = ["TensorboardSink"]


_FILES = "events.out.tfevents."


class TensorboardSink:
    """Implements `Sink`. Each start adds a file to `folder`; together they are one curve."""

    name = "tensorboard"

    def __init__(self, *, folder: Path) -> None:
        """Raises PluginError when the library is missing; nothing is written before `resume`."""
        try:
            self._library: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise PluginError(
                f"cannot record to tensorboard: the library is not installed ({error}); "
                f"run pip install 'tidemill[tensorboard]' or leave it out of recorder.use"
            ) from error
        self._folder = folder
        self._writers: list[Any] = []

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Open a file that begins with the order to forget `step` and later; from step 0 there is nothing to keep."""
        self.close()
        if step == 0:
            for path in self._folder.glob(f"{_FILES}*"):
                path.unlink()
        self._number_starts()
        self._writers.append(self._library.SummaryWriter(log_dir=str(self._folder), purge_step=step))

    def _number_starts(self) -> None:
        """TensorBoard reads files by name, which begins with a time: a clock that goes back must not change the order.

        Numbers of starts sort before any time, and the one file that has none yet is the last start's.
        """
        for number, path in enumerate(sorted(self._folder.glob(f"{_FILES}*"))):
            first = f"{_FILES}{number:010d}."
            if not path.name.startswith(first):
                path.rename(path.with_name(first + path.name.removeprefix(_FILES)))

    def write(self, step: int, event: Event) -> None:
        """Add finite numbers; TensorBoard has no place for others."""
        if not isinstance(event, (Metrics, Evaluated)):
            return
        for name, value in event.values.items():
            if math.isfinite(value):
                self._writers[0].add_scalar(name, float(value), step)

    def flush(self) -> None:
        """Nothing: its own thread writes; `state` waits for it."""

    def end_step(self, step: int) -> None:
        """Nothing: the library flushes every two minutes and `state` at each checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Flushed and fsynced; the step is all that `resume` needs."""
        for writer in self._writers:
            writer.flush()
        for path in self._folder.glob(f"{_FILES}*"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return {}

    def close(self) -> None:
        """Flush and close the file."""
        while self._writers:
            self._writers.pop().close()
