"""Ctrl-C and SIGTERM: the first asks the run to stop and loses nothing, the second ends the process at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Self

from tidemill.errors import Interrupted, Terminated

__all__ = ["Signals"]

_ERRORS = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


class Signals:
    """Implements `StopSignal`; handlers are installed within the `with` block, in the main thread only."""

    def __init__(self) -> None:
        self._arrived: signal.Signals | None = None
        self._raising = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _ERRORS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block a signal raises at once; on entry, one that has arrived before."""
        try:
            # In this order: a signal that comes between the two is seen by one of them.
            self._raising = True
            self.check()
            yield
        finally:
            self._raising = False

    def check(self) -> None:
        """Raises Interrupted (Ctrl-C) or Terminated (SIGTERM) when one has arrived."""
        if self._arrived is not None:
            raise _ERRORS[self._arrived](f"stopped by {self._arrived.name}; start the same command again to go on")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        arrived = signal.Signals(number)
        if self._arrived is not None:
            # Nothing may run any more: buffers, locks and threads are as they are, checkpoints are safe without us.
            _say("second signal, ending at once")
            os._exit(128 + number)
        self._arrived = arrived
        _say(f"{arrived.name}: saving the present state, then stopping (again: end at once)")
        if self._raising:
            self._raising = False
            self.check()


def _say(text: str) -> None:
    """Past Python's buffers, which may be half-way through a write; to nobody when nobody listens any more."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            # A terminal shows ^C, and perhaps half a progress bar, on the line where the cursor is.
            start = "\n" if sys.stderr.isatty() else ""
            os.write(sys.stderr.fileno(), f"{start}tidemill: {text}\n".encode())
