"""What goes on inside a run that is to be killed: it notes what was acknowledged, and dies where it shall."""

import os
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.campaign.disk_trace import DiskTrace
from tests.crash.campaign.kills import NEVER, Kill
from tidemill import faults
from tidemill.checkpoint.catalog import entries
from tidemill.residency.arena import Arena


def no_fault() -> None:
    """The program as it is."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Called in the driver before anything else; the workers inherit it. Files of `notes` are beside the run folder.

    `slow` seconds go by before each block is written. `fault` makes the program wrong, to test whoever watches it.
    """

    run: Path
    notes: Path
    kill: Kill = NEVER
    traced: bool = False
    slow: float = 0.0
    fault: Callable[[], object] = no_fault

    def __call__(self) -> None:
        """Begin."""
        self.notes.mkdir(exist_ok=True)
        _watch_arenas()
        self.fault()
        # Every point passes here, in every process, whatever is armed: `faults.passed` is for one process.
        faults._recording = _Points(self)
        if self.traced:
            DiskTrace(self.run, self.notes / "trace", self._before).begin()

    def _before(self, operation: int) -> None:
        if self.kill.at == "operation" and operation == self.kill.nth:
            die(self.kill, self.notes)

    @property
    def points(self) -> list[str]:
        """What was passed, each with its process, in order."""
        return _lines(self.notes / "points")

    @property
    def killed(self) -> str:
        """The process that reached the place of its kill, or nothing."""
        return "".join(_lines(self.notes / "killed")[:1])

    @property
    def held(self) -> str:
        """Where a save began while pages of a trainer's host copy were still held for an earlier one, or nothing."""
        return "".join(_lines(self.notes / "held")[:1])

    @property
    def acknowledged(self) -> int:
        """The newest step that was acknowledged, or 0."""
        return max(map(int, _lines(self.notes / "acknowledged")), default=0)


_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()


def _watch_arenas() -> None:
    begin = Arena.__init__

    def beginning(self: Arena, *args: Any, **words: Any) -> None:
        begin(self, *args, **words)
        _arenas.add(self)

    Arena.__init__ = beginning  # type: ignore[method-assign]


class _Points(list[str]):
    """Stands where the names of points are noted."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self._inside = inside
        self._counts: dict[str, int] = {}

    def append(self, name: str) -> None:
        """A point was passed."""
        inside, full = self._inside, f"{faults._process}/{name}"
        count = self._counts[full] = self._counts.get(full, 0) + 1
        note(inside.notes / "points", full)
        if inside.kill.at == "point" and (inside.kill.name, inside.kill.nth) == (full, count):
            die(inside.kill, inside.notes)
        if name == "checkpoint.write":
            time.sleep(inside.slow)
        if name == "checkpoint.open" and any(len(arena._readings) > 1 for arena in _arenas):
            note(inside.notes / "held", full)
        if full == "driver/checkpoint.acknowledged":
            # A save on trial passes here, too, and leaves no entry.
            for entry in entries(inside.run / "checkpoints")[-1:]:
                note(inside.notes / "acknowledged", str(entry.step))


def note(path: Path, text: str) -> None:
    """A line that no kill tears."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def die(kill: Kill, notes: Path) -> None:
    """At once, and with the others of the run if so: they are one process group."""
    note(notes / "killed", faults._process)
    if kill.whom == "all" or kill.power:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
