"""What workers print: each writes to a file of its own in the run folder, and the driver shows it line by line."""

import os
import threading
from pathlib import Path

from tidemill.contracts.events import Emit, Notice

__all__ = ["LogTail", "last_lines"]

_EVERY = 0.2  # seconds
_SHOWN_AT_ONCE = 100  # lines of one worker; who prints more is read in the file


class _File:
    """A file that grows."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self, *, to_the_end: bool) -> list[str]:
        """Whole lines since the last look; the unfinished one too when this is `to_the_end`."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                piece = file.read()
        except OSError:
            return []
        self._offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if to_the_end and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [_shown(line) for line in lines]


def _shown(line: bytes) -> str:
    """A progress bar draws over itself: its last state counts."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class LogTail:
    """Follows logs from their present end, in a thread, until `close`, which shows what is left."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._files: list[_File] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="worker-logs", daemon=True)
        self._thread.start()

    def add(self, name: str, path: Path) -> None:
        """Show the lines that come to `path` from now on, prefixed by `name`."""
        with self._lock:
            self._files.append(_File(name, path))

    def close(self) -> None:
        """Show what is left. May be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._show(to_the_end=True)

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY):
            self._show(to_the_end=False)

    def _show(self, *, to_the_end: bool) -> None:
        with self._lock:
            for file in self._files:
                lines = [line for line in file.new_lines(to_the_end=to_the_end) if line.strip()]
                for line in lines[:_SHOWN_AT_ONCE]:
                    self._emit(Notice(text=f"{file.name} | {line}"))
                if len(lines) > _SHOWN_AT_ONCE:
                    more = len(lines) - _SHOWN_AT_ONCE
                    self._emit(Notice(text=f"{file.name} | ({more} more lines in {file.path})"))


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The end of a log; nothing when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
            return [_shown(line) for line in file.read().split(b"\n") if line.strip()][-count:]
    except OSError:
        return []
