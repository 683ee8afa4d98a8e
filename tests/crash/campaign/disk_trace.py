"""What all processes of a run do to its folder, one operation after the other, kept so that it can be made again.

A record is written before its operation, under a lock that all processes share: of a run that is killed at most the
last record may not have been made, and that is a run that was killed a moment later. A hard link keeps each file whose
name goes. What fsync was called for is copied at that moment; the real disk is not waited for.
"""

import fcntl
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.testing.watched_folder import Operation, WatchedFolder

LOG, NODES = "log.jsonl", "nodes"


def has_begun(trace: Path) -> bool:
    """Whether whoever traces into `trace` lived to see the first operation."""
    return (trace / LOG).exists() and '"kind": "begun"' in (trace / LOG).read_text()


class DiskTrace:
    """Traces `run` into the new folder `trace`, in this process and in all that are forked from it, for good.

    `before` is told how manieth operation comes, from 1, in whichever process, and may kill.
    """

    def __init__(self, run: Path, trace: Path, before: Callable[[int], None]) -> None:
        self._run, self._trace, self._before = run.resolve(), trace, before
        self._count = mmap.mmap(-1, 8)  # shared with children
        self._made = 0
        self._begin_in_process()
        os.register_at_fork(after_in_child=self._begin_in_process)

    def _begin_in_process(self) -> None:
        self._threads = threading.RLock()
        self._log = -1

    def begin(self) -> None:
        """What is there is durable. From here on every operation is traced."""
        (self._trace / NODES).mkdir(parents=True)
        for path in sorted(self._run.rglob("*")):
            if path.is_dir():
                self._write(kind="make", path=path, durable=True)
            else:
                node = self._node(path)
                os.link(path, self._trace / NODES / node)
                self._write(kind="create", path=path, node=node, copy=self._copy(path), durable=True)
        self._write(kind="begun", path=self._run)
        WatchedFolder(self._run, self._carry_out, files=True).__enter__()

    def _carry_out(self, operation: Operation, really: Callable[[], Any]) -> Any:
        with self._locked():
            number = int.from_bytes(self._count[:], "big") + 1
            self._count[:] = number.to_bytes(8, "big")
            self._before(number)
            match operation.kind:
                case "write":
                    # The bytes are read when they count; told only so that operations can be counted.
                    self._write(kind="write", path=operation.path)
                    return really()
                case "sync":
                    return self._sync(operation)
                case "create":
                    return self._create(operation.path, really)
            self._write(kind=operation.kind, path=operation.path, target=operation.target)
            return self._made_or_taken_back(really)

    def _create(self, path: Path, really: Callable[[], Any]) -> Any:
        node = self._node(path)
        self._write(kind="create", path=path, node=node)
        result = self._made_or_taken_back(really)
        os.link(path, self._trace / NODES / node)
        return result

    def _sync(self, operation: Operation) -> None:
        path = operation.path
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(operation.descriptor)):
            return
        if path.is_dir():
            self._write(kind="sync", path=path)
        else:
            self._write(kind="sync", path=path, copy=self._copy(path))

    def _made_or_taken_back(self, really: Callable[[], Any]) -> Any:
        try:
            return really()
        except BaseException:
            self._write(kind="failed", path=self._run)
            raise

    def _copy(self, path: Path) -> str:
        copy = f"{self._node(path)}.copy"
        shutil.copyfile(path, self._trace / NODES / copy)
        return copy

    def _node(self, path: Path) -> str:
        self._made += 1
        return f"{os.getpid()}-{self._made}"

    def _write(self, *, kind: str, path: Path, target: Path | None = None, **more: Any) -> None:
        names = {"path": str(path.relative_to(self._run))}
        if kind == "move" and target is not None:
            names["target"] = str(target.relative_to(self._run))
        os.write(self._descriptor(), (json.dumps({"kind": kind, **names, **more}) + "\n").encode())

    def _descriptor(self) -> int:
        """Of the log. A lock of `flock` belongs to whoever opened the file, so that each process opens it itself."""
        if self._log < 0:
            self._log = os.open(self._trace / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._log

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._descriptor(), fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor(), fcntl.LOCK_UN)
