"""What this process does to a folder, operation by operation: the functions of `os` that change one are watched.

A change of names that is made in C, or by a process that does not watch, is not seen. Children that are forked in the
block go on watching: what is told of an operation has to know in which process it is.
"""

import builtins
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Operation", "WatchedFolder"]

_CONTENTS = ("write", "writev", "pwrite", "pwritev", "ftruncate", "posix_fallocate")
_SYNCS = ("fsync", "fdatasync")
_REMOVALS = ("unlink", "remove", "rmdir")
_MOVES = ("rename", "replace")
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Operation:
    """`kind` is `create`, `make` (a folder), `move` (to `target`), `remove`, `write` or `sync`.

    The last two are of a `descriptor`; all are of `path`, which may be the folder itself, and not there any more.
    """

    kind: str
    function: str
    path: Path
    target: Path = Path()
    descriptor: int = -1

    @property
    def words(self) -> str:
        """For people: `rename a to b`."""
        match self.kind:
            case "create":
                return f"create {self.path.name}"
            case "move":
                return f"rename {self.path.name} to {self.target.name}"
        return f"{self.function} {self.path.name}"


CarryOut = Callable[[Operation, Callable[[], Any]], Any]


class WatchedFolder:
    """`with WatchedFolder(folder, carry_out):` each operation in it is left to `carry_out(operation, really)`.

    `really()` makes it; what `carry_out` returns, the program gets. With `files` the files that Python's `open` creates
    are seen too, as `os.open` creates them; what is written to such a file never is.
    """

    def __init__(self, folder: Path, carry_out: CarryOut, *, files: bool = False) -> None:
        self.folder = folder.resolve()
        self._carry_out = carry_out
        self._files = files
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        """Watch."""
        watched: dict[str, Callable[..., Any]] = {"open": self._open, "mkdir": self._make}
        watched |= dict.fromkeys((*_CONTENTS, *_SYNCS), self._on_descriptor)
        watched |= dict.fromkeys(_REMOVALS, self._remove)
        watched |= dict.fromkeys(_MOVES, self._move)
        for name, watch in watched.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, _watching(self._real[name], watch, name))
        self._opened = builtins.open
        if self._files:
            builtins.open = io.open = _opening(self._opened)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Watch no more."""
        builtins.open = io.open = self._opened
        for name, function in self._real.items():
            setattr(os, name, function)

    def _open(self, real: Callable[..., Any], name: str, path: Any, flags: int, *args: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd")) if flags & os.O_CREAT else None
        if place is None or os.path.lexists(place):
            return real(path, flags, *args, **words)
        return self._carry_out(Operation("create", name, place), lambda: real(path, flags, *args, **words))

    def _make(self, real: Callable[..., Any], name: str, path: Any, *args: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd"))
        if place is None or os.path.lexists(place):
            return real(path, *args, **words)
        return self._carry_out(Operation("make", name, place), lambda: real(path, *args, **words))

    def _move(self, real: Callable[..., Any], name: str, source: Any, target: Any, **words: Any) -> Any:
        old, new = self._place(source, words.get("src_dir_fd")), self._place(target, words.get("dst_dir_fd"))
        if old is None and new is None:
            return real(source, target, **words)
        assert old is not None and new is not None and old.parent == new.parent, (
            f"{old} leaves its folder: not foreseen"
        )
        return self._carry_out(Operation("move", name, old, new), lambda: real(source, target, **words))

    def _remove(self, real: Callable[..., Any], name: str, path: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd"))
        if place is None or not os.path.lexists(place):
            return real(path, **words)
        return self._carry_out(Operation("remove", name, place), lambda: real(path, **words))

    def _on_descriptor(self, real: Callable[..., Any], name: str, descriptor: int, *args: Any, **words: Any) -> Any:
        try:
            place = Path(str(Path(f"/proc/self/fd/{descriptor}").readlink()).removesuffix(_DELETED))
        except OSError:
            return real(descriptor, *args, **words)
        if not place.is_relative_to(self.folder):
            return real(descriptor, *args, **words)
        operation = Operation("sync" if name in _SYNCS else "write", name, place, descriptor=descriptor)
        return self._carry_out(operation, lambda: real(descriptor, *args, **words))

    def _place(self, path: Any, folder: int | None) -> Path | None:
        """Where in our folder `path` is, or None."""
        base = Path(f"/proc/self/fd/{folder}").readlink() if folder is not None else Path.cwd()
        place = base / os.fsdecode(path)
        place = place.parent.resolve() / place.name
        return place if place.is_relative_to(self.folder) and place != self.folder else None


def _watching(real: Callable[..., Any], watch: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *args, **words: watch(real, name, *args, **words)


def _opening(real: Callable[..., Any]) -> Callable[..., Any]:
    """`open` by way of `os.open`, where a file may be created."""

    def opened(file: Any, mode: str = "r", *args: Any, **words: Any) -> Any:
        creates = not isinstance(file, int) and set(mode) & set("wax")
        if creates and words.get("opener") is None and len(args) < 6:
            words["opener"] = lambda path, flags: os.open(path, flags, 0o666)
        return real(file, mode, *args, **words)

    return opened
