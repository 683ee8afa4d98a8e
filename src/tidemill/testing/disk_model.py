"""Files and folders on a disk that loses what was not synced, as a model: what may be left of them after a power cut.

No more is kept than POSIX says: fsync of a file keeps its bytes, not its name; fsync of a folder keeps the names in it,
not the bytes behind them. Everything else may have reached the disk or not, in any choice: names one by one, bytes in
parts. A rename is whole or not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Change", "Choose", "DiskModel", "Node", "Tear", "halves"]

Choose = Callable[[int], int]
"""One of so many possibilities, counted from 0: the adversary. 0 is always that it did not reach the disk, the last
that all of it did."""

Tear = Callable[[bytes, bytes, Choose], bytes]
"""What is left of a file, from its durable bytes, its bytes now, which differ, and the adversary."""


@dataclass(eq=False)
class Node:
    """A file or a folder, and what of it is durable. `now` reads the bytes that a reader sees."""

    is_folder: bool
    now: Callable[[], bytes]
    contents: bytes = b""
    names: dict[str, "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """In `folder`, `name` stands for `node` from now on, or for nothing."""

    folder: Node
    name: str
    node: Node | None


def halves(durable: bytes, now: bytes, choose: Choose) -> bytes:
    """None of it, all of it, or one half, the other being as before, missing or zeros."""
    half = len(now) // 2
    halves = [now[:half], now[:half] + bytes(len(now) - half), now[:half] + durable[half:], bytes(half) + now[half:]]
    options = [durable, *halves, bytes(len(now)), now]
    return options[choose(len(options))]


class DiskModel:
    """All below `root`, which with everything in it is durable at the beginning."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self._pending: list[tuple[Change, ...]] = []

    def change(self, *changes: Change) -> None:
        """What comes true together or not at all, some time before its folder is synced or with that."""
        self._pending.append(changes)

    def sync(self, node: Node) -> None:
        """Make the bytes of a file durable, or the names in a folder."""
        if not node.is_folder:
            node.contents = node.now()
            return
        node.names = self.names(lambda: True, of=node)[node]
        rest = [tuple(change for change in changes if change.folder is not node) for changes in self._pending]
        self._pending = [changes for changes in rest if changes]

    def names(self, keep: Callable[[], bool] = lambda: True, of: Node | None = None) -> dict[Node, dict[str, Node]]:
        """What names stand for, in all folders or in one, when those unsynced changes come true that `keep` says."""
        found = {node: dict(node.names) for node in self.live() if node.is_folder}
        for changes in self._pending:
            mine = [change for change in changes if of is None or change.folder is of]
            if mine and keep():
                for change in mine:
                    _apply(found[change.folder], change)
        return found

    def live(self) -> list[Node]:
        """Every node that a name, durable or not, leads to."""
        changes = [change for changes in self._pending for change in changes]
        waiting = [self.root, *(node for change in changes for node in (change.folder, change.node) if node)]
        found: dict[Node, None] = {}
        while waiting:
            node = waiting.pop()
            if node not in found:
                found[node] = None
                waiting += node.names.values()
        return list(found)

    def leave(self, target: Path, choose: Choose, *, tear: Tear = halves) -> None:
        """Build in `target`, which must not exist, what `choose` picks of all that a power cut now may leave."""
        _build(self.root, target, self.names(lambda: choose(2) == 1), choose, tear)


def _build(node: Node, target: Path, names: dict[Node, dict[str, Node]], choose: Choose, tear: Tear) -> None:
    if not node.is_folder:
        now = node.now()
        target.write_bytes(now if now == node.contents else tear(node.contents, now, choose))
        return
    target.mkdir()
    for name, child in sorted(names[node].items()):
        _build(child, target / name, names, choose, tear)


def _apply(names: dict[str, Node], change: Change) -> None:
    if change.node is None:
        names.pop(change.name, None)
        return
    # A thing has one name in its folder: a rename that came true ends the name before, whatever it was.
    for name in [name for name, node in names.items() if node is change.node]:
        del names[name]
    names[change.name] = change.node
