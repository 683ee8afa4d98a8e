"""A writer in the background that goes one operation on the disk at a time, when it is told to."""

import errno
import threading

from tests.residency.life_cycle_turns import in_turn

__all__ = ["StepwiseWriter"]

_WRITER = "checkpoint-writer"
_LOOK = 0.0005  # seconds between looks at whether a thread has ended
_PATIENCE = 20.0  # seconds after which a thread that neither stops nor ends is a fault of the test


class StepwiseWriter:
    """What is done before each operation on a VolatileDisk, by whatever thread: those of the writer wait to be let on.

    At most one thread is between two operations at any time, so that every run of it is the same.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting = False
        self._let_on = 0
        self.at = ""
        self._fails_in = 0
        self.has_failed = False

    def before(self, operation: str) -> None:
        """See VolatileDisk."""
        in_turn(operation)
        with self._changed:
            if self._thread is not None and threading.current_thread() is not threading.main_thread():
                self.at = operation
                self._wait()
            self._fails_in -= 1
            if self._fails_in == 0:
                self.has_failed = True
                raise OSError(errno.ENOSPC, f"No space left on device (injected before: {operation})")

    def _wait(self) -> None:
        self._waiting = True
        self._changed.notify_all()
        while not self._let_on:
            assert self._changed.wait(_PATIENCE), "nobody lets the writer go on"
        self._let_on -= 1
        self._waiting = False

    def fail(self, after: int) -> None:
        """The operation after the next `after` fails; 0 operations more is the next one."""
        self._fails_in = after + 1

    def never_fail(self) -> None:
        """Forget what was to fail."""
        self._fails_in = 0
        self.has_failed = False

    def hold(self) -> None:
        """From now on writers stop before each operation; before one is started."""
        self._thread = threading.Thread()

    def follow(self) -> None:
        """The writer that was just started: returns when it stands before its first operation, or has ended."""
        found = [thread for thread in threading.enumerate() if thread.name == _WRITER]
        if found:
            (self._thread,) = found
            self._settle(found[0])

    def go(self, operations: int) -> bool:
        """Let the writer make so many operations, or fewer if it ends; whether it has ended."""
        thread = self._thread
        assert thread is not None
        for _ in range(operations):
            if not thread.is_alive():
                return True
            with self._changed:
                self._let_on += 1
                self._waiting = False
                self._changed.notify_all()
            self._settle(thread)
        return not thread.is_alive()

    def _settle(self, thread: threading.Thread) -> None:
        with self._changed:
            for _ in range(int(_PATIENCE / _LOOK)):
                if self._waiting or not thread.is_alive():
                    return
                self._changed.wait(_LOOK)
        raise AssertionError("the writer neither makes an operation nor ends")
