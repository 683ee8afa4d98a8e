"""What a power cut may leave of a traced run folder: any choice of what was not synced, files torn at any block."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.crash.campaign.disk_trace import LOG, NODES
from tidemill.testing.disk_model import Change, Choose, DiskModel, Node

BLOCK = 4096


class Replay:
    """The model of the disk after everything in `trace`, a folder that DiskTrace has begun to write."""

    def __init__(self, trace: Path) -> None:
        self._files = trace / NODES
        self.model = DiskModel(Node(True, bytes))
        records = [json.loads(line) for line in (trace / LOG).read_text().splitlines()]
        for record, after in zip(records, [*records[1:], {"kind": "end"}], strict=True):
            if record["kind"] not in ("begun", "failed", "write") and after["kind"] != "failed":
                self._make(record)

    def leave(self, target: Path, choose: Choose) -> None:
        """See DiskModel."""
        self.model.leave(target, choose, tear=blocks)

    def unseen(self, run: Path) -> set[str]:
        """Names in `run` that no record tells of."""
        return {str(path.relative_to(run)) for path in run.rglob("*")} - set(self._paths(self.model.root, ""))

    def _paths(self, node: Node, path: str) -> list[str]:
        found = []
        for name, child in self.model.names()[node].items():
            found += [path + name, *(self._paths(child, f"{path}{name}/") if child.is_folder else [])]
        return found

    def _make(self, record: dict[str, Any]) -> None:
        match record:
            case {"kind": "sync", "path": path}:
                node = self._at(path)
                if node.is_folder:
                    self.model.sync(node)
                else:
                    node.contents = (self._files / record["copy"]).read_bytes()
            case {"kind": "move", "path": path, "target": target}:
                node = self._at(path)
                self.model.change(self._change(path, None), self._change(target, node))
            case {"kind": "remove", "path": path}:
                self.model.change(self._change(path, None))
            case {"path": path}:
                self._begin(path, record)

    def _begin(self, path: str, record: dict[str, Any]) -> None:
        node = Node(True, bytes)
        if record["kind"] == "create":
            node = Node(False, partial(_read, self._files / record["node"]))
        if not record.get("durable"):
            self.model.change(self._change(path, node))
            return
        if not node.is_folder:
            node.contents = (self._files / record["copy"]).read_bytes()
        self._at(str(Path(path).parent)).names[Path(path).name] = node

    def _at(self, path: str) -> Node:
        names, node = self.model.names(), self.model.root
        for name in Path(path).parts:
            node = names[node][name]
        return node

    def _change(self, path: str, node: Node | None) -> Change:
        return Change(self._at(str(Path(path).parent)), Path(path).name, node)


def blocks(durable: bytes, now: bytes, choose: Choose) -> bytes:
    """None of it, all of it, or of each block what is there now or what was durable, zeros where there was nothing.

    What grew may end at any block behind its durable end.
    """
    kind = choose(3)
    if kind in (0, 2):
        return now if kind else durable
    size = len(now)
    if size > len(durable) and choose(2):
        size = min(size, (len(durable) // BLOCK + choose((size - len(durable)) // BLOCK + 1)) * BLOCK)
        size = max(size, len(durable))
    found = bytearray(durable[:size].ljust(size, b"\0"))
    for start in range(0, size, BLOCK):
        if choose(2):
            end = min(start + BLOCK, size)
            found[start:end] = now[start:end]
    return bytes(found)


def _read(path: Path) -> bytes:
    """Nothing of a file that was told of and not made."""
    return path.read_bytes() if path.exists() else b""
