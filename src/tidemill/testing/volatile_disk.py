"""A folder on a disk that loses what was not synced: what a power cut may leave of it is built beside it.

No more is kept than POSIX says: fsync of a file keeps its bytes, not its name; fsync of a folder keeps the names in it,
not the bytes behind them. Everything else may have reached the disk or not, in any choice: names one by one, bytes in
parts. A rename is whole or not at all.

The code under test runs as ever, in a real folder, while the functions of `os` that change one are watched. Bytes are
read when they count, not when they are written, so that it does not matter how they came there. A change of names that
was not seen (made in C, or by another process) is noticed and is an error.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Choose", "PowerCut", "VolatileDisk"]

Choose = Callable[[int], int]
"""One of so many possibilities, counted from 0: the adversary. 0 is always that it did not reach the disk, the last
that all of it did."""

_CONTENTS = ("write", "writev", "pwrite", "pwritev", "ftruncate", "posix_fallocate")
_SYNCS = ("fsync", "fdatasync")
_REMOVALS = ("unlink", "remove", "rmdir")
_MOVES = ("rename", "replace")


class PowerCut(BaseException):
    """Raised by whatever a process still does to a disk that has no power. No Exception: nothing may handle it."""


@dataclass(eq=False)
class _Node:
    """A file or a folder, and what of it is durable. The open descriptor keeps what lost its name readable."""

    descriptor: int
    is_folder: bool
    contents: bytes = b""
    names: dict[str, "_Node"] = field(default_factory=dict)

    def now(self) -> bytes:
        """The bytes that a reader sees now."""
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


@dataclass(frozen=True)
class _Change:
    """In `folder`, `name` stands for `node` from now on, or for nothing."""

    folder: _Node
    name: str
    node: _Node | None


class VolatileDisk:
    """`with VolatileDisk(folder) as disk:` everything that this process does in `folder` is watched.

    What is there at the beginning is durable. One at a time; `leave` and `cut` are for the block's inside.
    """

    def __init__(self, folder: Path, *, before: Callable[[str], None] = lambda operation: None) -> None:
        """`before` is called before each operation, in words, by the thread that makes it: it may wait or raise."""
        self._folder = folder.resolve()
        self._before = before
        self._lock = threading.RLock()
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._pending: list[tuple[_Change, ...]] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self._left: int | None = None
        self.operations = 0

    def __enter__(self) -> "VolatileDisk":
        """Watch."""
        self._root = self._learn(self._folder)
        watched: dict[str, Callable[..., Any]] = {"open": self._open, "mkdir": self._make}
        watched |= dict.fromkeys((*_CONTENTS, *_SYNCS), self._on_descriptor)
        watched |= dict.fromkeys(_REMOVALS, self._remove)
        watched |= dict.fromkeys(_MOVES, self._move)
        for name, watch in watched.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, _watching(self._real[name], watch, name))
        return self

    def __exit__(self, *error: object) -> None:
        """Watch no more."""
        for name, function in self._real.items():
            setattr(os, name, function)
        for node in self._nodes.values():
            os.close(node.descriptor)

    def cut(self, after: int = 0) -> None:
        """Cut the power after that many operations more: later ones do nothing and raise PowerCut."""
        with self._lock:
            self._left = after

    @property
    def is_dead(self) -> bool:
        """Whether the power is cut."""
        return self._left == 0

    def leave(self, target: Path, choose: Choose) -> None:
        """Build in `target`, which must not exist, what `choose` picks of all that a power cut now may leave."""
        with self._lock:
            self._check_nothing_was_missed()
            self._build(self._root, target, self._names(lambda: choose(2) == 1), choose)

    # What is watched

    def _open(self, real: Callable[..., Any], name: str, path: Any, flags: int, *args: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd"))
        if place is None or not flags & os.O_CREAT or os.path.lexists(place):
            return real(path, flags, *args, **words)
        with self._operation(f"create {place.name}"):
            descriptor = real(path, flags, *args, **words)
            self._pending.append((self._change(place, self._learn(place)),))
            return descriptor

    def _make(self, real: Callable[..., Any], name: str, path: Any, *args: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd"))
        if place is None or os.path.lexists(place):
            return real(path, *args, **words)
        with self._operation(f"mkdir {place.name}"):
            real(path, *args, **words)
            self._pending.append((self._change(place, self._learn(place)),))

    def _move(self, real: Callable[..., Any], name: str, source: Any, target: Any, **words: Any) -> Any:
        old, new = self._place(source, words.get("src_dir_fd")), self._place(target, words.get("dst_dir_fd"))
        if old is None and new is None:
            return real(source, target, **words)
        assert old is not None and new is not None and old.parent == new.parent, (
            f"{old} leaves its folder: not foreseen"
        )
        with self._operation(f"rename {old.name} to {new.name}"):
            node = self._node(os.lstat(old))
            real(source, target, **words)
            self._pending.append((self._change(old, None), self._change(new, node)))

    def _remove(self, real: Callable[..., Any], name: str, path: Any, **words: Any) -> Any:
        place = self._place(path, words.get("dir_fd"))
        if place is None or not os.path.lexists(place):
            return real(path, **words)
        with self._operation(f"{name} {place.name}"):
            real(path, **words)
            self._pending.append((self._change(place, None),))

    def _on_descriptor(self, real: Callable[..., Any], name: str, descriptor: int, *args: Any, **words: Any) -> Any:
        stat = os.fstat(descriptor)
        node = self._nodes.get((stat.st_dev, stat.st_ino))
        if node is None:
            return real(descriptor, *args, **words)
        with self._operation(f"{name} {Path(f'/proc/self/fd/{descriptor}').readlink().name}"):
            if name not in _SYNCS:
                return real(descriptor, *args, **words)
            # Durable is what is called so here: the real disk need not be waited for.
            return self._sync(node)

    def _sync(self, node: _Node) -> None:
        if not node.is_folder:
            node.contents = node.now()
            return
        names = self._names(lambda: True, of=node)
        node.names = names[node]
        rest = [tuple(change for change in changes if change.folder is not node) for changes in self._pending]
        self._pending = [changes for changes in rest if changes]
        self._forget_what_is_gone()

    # Names and nodes

    @contextmanager
    def _operation(self, words: str) -> Iterator[None]:
        self._before(words)
        with self._lock:
            if self._left == 0:
                raise PowerCut(f"the power was cut before: {words}")
            if self._left is not None:
                self._left -= 1
            self.operations += 1
            yield

    def _place(self, path: Any, folder: int | None) -> Path | None:
        """Where in our folder `path` is, or None."""
        base = Path(f"/proc/self/fd/{folder}").readlink() if folder is not None else Path.cwd()
        place = base / os.fsdecode(path)
        place = place.parent.resolve() / place.name
        return place if place.is_relative_to(self._folder) and place != self._folder else None

    def _learn(self, path: Path) -> _Node:
        """The node of what is there; all in it is durable, as what was just made is empty."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        descriptor = self._real.get("open", os.open)(path, flags)
        stat = os.fstat(descriptor)
        node = _Node(descriptor, path.is_dir())
        self._nodes[stat.st_dev, stat.st_ino] = node
        if node.is_folder:
            node.names = {entry.name: self._learn(entry) for entry in sorted(path.iterdir())}
        else:
            node.contents = node.now()
        return node

    def _node(self, stat: os.stat_result) -> _Node:
        return self._nodes[stat.st_dev, stat.st_ino]

    def _change(self, place: Path, node: _Node | None) -> _Change:
        return _Change(self._node(place.parent.stat()), place.name, node)

    def _names(self, keep: Callable[[], bool], of: _Node | None = None) -> dict[_Node, dict[str, _Node]]:
        """What names stand for, in all folders or in one, when those unsynced changes come true that `keep` says."""
        found = {node: dict(node.names) for node in self._nodes.values() if node.is_folder}
        for changes in self._pending:
            mine = [change for change in changes if of is None or change.folder is of]
            if mine and keep():
                for change in mine:
                    _apply(found[change.folder], change)
        return found

    def _build(self, node: _Node, target: Path, names: dict[_Node, dict[str, _Node]], choose: Choose) -> None:
        if not node.is_folder:
            target.write_bytes(_left_of(node.contents, node.now(), choose))
            return
        target.mkdir()
        for name, child in sorted(names[node].items()):
            self._build(child, target / name, names, choose)

    def _check_nothing_was_missed(self) -> None:
        names = self._names(lambda: True)
        found, known = dict(_tree(self._folder)), dict(self._known(self._root, self._folder, names))
        assert found == known, f"changes were made that nobody saw: {set(found.items()) ^ set(known.items())}"

    def _known(self, node: _Node, path: Path, names: dict[_Node, dict[str, _Node]]) -> Iterator[tuple[Path, int]]:
        for name, child in names.get(node, {}).items():
            yield path / name, os.fstat(child.descriptor).st_ino
            yield from self._known(child, path / name, names)

    def _forget_what_is_gone(self) -> None:
        """Nodes that no name, durable or not, leads to any more."""
        waiting = [
            self._root,
            *(node for changes in self._pending for c in changes for node in (c.folder, c.node) if node),
        ]
        live: set[_Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in live:
                live.add(node)
                waiting += node.names.values()
        for key, node in list(self._nodes.items()):
            if node not in live:
                os.close(self._nodes.pop(key).descriptor)


def _watching(real: Callable[..., Any], watch: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *args, **words: watch(real, name, *args, **words)


def _apply(names: dict[str, _Node], change: _Change) -> None:
    if change.node is None:
        names.pop(change.name, None)
        return
    # A thing has one name in its folder: a rename that came true ends the name before, whatever it was.
    for name in [name for name, node in names.items() if node is change.node]:
        del names[name]
    names[change.name] = change.node


def _left_of(durable: bytes, now: bytes, choose: Choose) -> bytes:
    """Of a file that has the bytes `now`, of which it had `durable` when it was last synced."""
    if now == durable:
        return now
    half = len(now) // 2
    halves = [now[:half], now[:half] + bytes(len(now) - half), now[:half] + durable[half:], bytes(half) + now[half:]]
    options = [durable, *halves, bytes(len(now)), now]
    return options[choose(len(options))]


def _tree(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.iterdir():
        yield path, path.lstat().st_ino
        if path.is_dir():
            yield from _tree(path)
