"""Who may move memory now: one at a time, and nobody while something is on its way piece by piece."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidemill.errors import ResidencyError
from tidemill.units import format_seconds

__all__ = ["Turn", "Turns"]


@dataclass(kw_only=True, eq=False)
class Turn:
    """What is being done, as a verb, and by which thread; and what may be done beside it once that is set."""

    doing: str
    in_pieces: bool
    thread: int = field(default_factory=threading.get_ident)
    admits: str = ""


class Turns:
    """Turns at one saver's memory. One in pieces outlasts the call that took it: other threads wait for its end, and
    the one that began it, which would wait for itself, is refused meanwhile."""

    def __init__(self, *, seconds: float) -> None:
        """`seconds` is the longest wait for another one's turn to end."""
        self._seconds = min(seconds, threading.TIMEOUT_MAX)
        self._changed = threading.Condition()
        self._under_way: list[Turn] = []

    @contextlib.contextmanager
    def take(self, doing: str, *, in_pieces: bool = False) -> Iterator[Turn]:
        """A turn, when nothing is under way that does not admit it. Raises ResidencyError for what this thread began in
        pieces."""
        turn = Turn(doing=doing, in_pieces=in_pieces)
        with self._changed:
            self._wait(doing)
            self._under_way.append(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._under_way.remove(turn)
                self._changed.notify_all()

    def admit(self, turn: Turn, doing: str) -> None:
        """Let `doing` go on beside the turn from now on."""
        with self._changed:
            turn.admits = doing
            self._changed.notify_all()

    def _wait(self, doing: str) -> None:
        ends = time.monotonic() + self._seconds
        while others := [turn for turn in self._under_way if turn.admits != doing]:
            other = others[0]
            if other.in_pieces and other.thread == threading.get_ident():
                raise ResidencyError(f"cannot {doing}: {other.doing!r} is half done; let it end, or close it, first")
            left = ends - time.monotonic()
            if left <= 0:
                raise ResidencyError(
                    f"cannot {doing}: {other.doing!r} is under way for {format_seconds(self._seconds)}"
                )
            self._changed.wait(left)
