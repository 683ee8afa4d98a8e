"""A folder on a disk that loses what was not synced: what a power cut may leave of it is built beside it.

The code under test runs as ever, in a real folder, while the functions of `os` that change one are watched. Bytes are
read when they count, not when they are written, so that it does not matter how they came there. A change of names that
was not seen (made in C, or by another process) is noticed and is an error.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.testing.disk_model import Change, Choose, DiskModel, Node
from tidemill.testing.watched_folder import Operation, WatchedFolder

__all__ = ["Choose", "PowerCut", "VolatileDisk"]


class PowerCut(BaseException):
    """Raised by whatever a process still does to a disk that has no power. No Exception: nothing may handle it."""


class VolatileDisk:
    """`with VolatileDisk(folder) as disk:` everything that this process does in `folder` is watched.

    What is there at the beginning is durable. One at a time; `leave` and `cut` are for the block's inside.
    """

    def __init__(self, folder: Path, *, before: Callable[[str], None] = lambda operation: None) -> None:
        """`before` is called before each operation, in words, by the thread that makes it: it may wait or raise."""
        self._watched = WatchedFolder(folder, self._carry_out)
        self._before = before
        self._lock = threading.RLock()
        # Open descriptors keep what lost its name readable, and its number its own.
        self._nodes: dict[tuple[int, int], tuple[Node, int]] = {}
        self._left: int | None = None
        self.operations = 0

    def __enter__(self) -> "VolatileDisk":
        """Watch."""
        self._model = DiskModel(self._learn(self._watched.folder))
        self._watched.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Watch no more."""
        self._watched.__exit__(*error)
        for _, descriptor in self._nodes.values():
            os.close(descriptor)

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
            self._model.leave(target, choose)

    def _carry_out(self, operation: Operation, really: Callable[[], Any]) -> Any:
        if operation.descriptor >= 0:
            return self._on_descriptor(operation, really)
        path = operation.path
        with self._operation(operation.words):
            moved = self._node(os.lstat(path)) if operation.kind == "move" else None
            result = really()
            if moved is not None:
                self._model.change(self._change(path, None), self._change(operation.target, moved))
            else:
                self._model.change(self._change(path, None if operation.kind == "remove" else self._learn(path)))
            return result

    def _on_descriptor(self, operation: Operation, really: Callable[[], Any]) -> Any:
        stat = os.fstat(operation.descriptor)
        if (stat.st_dev, stat.st_ino) not in self._nodes:
            return really()
        with self._operation(operation.words):
            if operation.kind != "sync":
                return really()
            # Durable is what is called so here: the real disk need not be waited for.
            self._model.sync(self._node(stat))
            self._forget_what_is_gone()
            return None

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

    def _learn(self, path: Path) -> Node:
        """The node of what is there; all in it is durable, as what was just made is empty."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        stat = os.fstat(descriptor)
        node = Node(path.is_dir(), partial(_read, descriptor))
        self._nodes[stat.st_dev, stat.st_ino] = node, descriptor
        if node.is_folder:
            node.names = {entry.name: self._learn(entry) for entry in sorted(path.iterdir())}
        else:
            node.contents = node.now()
        return node

    def _node(self, stat: os.stat_result) -> Node:
        return self._nodes[stat.st_dev, stat.st_ino][0]

    def _change(self, place: Path, node: Node | None) -> Change:
        return Change(self._node(place.parent.stat()), place.name, node)

    def _check_nothing_was_missed(self) -> None:
        numbers = {node: number for (_, number), (node, _) in self._nodes.items()}
        names = self._model.names()
        found = dict(_tree(self._watched.folder))
        known = {path: numbers[node] for path, node in _known(self._model.root, self._watched.folder, names)}
        assert found == known, f"changes were made that nobody saw: {set(found.items()) ^ set(known.items())}"

    def _forget_what_is_gone(self) -> None:
        """Nodes that no name, durable or not, leads to any more."""
        live = set(self._model.live())
        for key, (node, descriptor) in list(self._nodes.items()):
            if node not in live:
                os.close(descriptor)
                del self._nodes[key]


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _known(node: Node, path: Path, names: dict[Node, dict[str, Node]]) -> Iterator[tuple[Path, Node]]:
    for name, child in names.get(node, {}).items():
        yield path / name, child
        yield from _known(child, path / name, names)


def _tree(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.iterdir():
        yield path, path.lstat().st_ino
        if path.is_dir():
            yield from _tree(path)
