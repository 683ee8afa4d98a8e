"""One process a run folder. The kernel lets go of the lock when its holder dies, however it dies.

Works between machines where the file system's flock does. Forked children give their copy of the lock back at once,
or one that outlives a killed run would hold its folder.
"""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.errors import ConfigError, RunLockedError

__all__ = ["RunLock"]


class RunLock:
    """`with RunLock(folder):` while the run lasts. Creates the folder when it is not there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Raises RunLockedError that names the owner, ConfigError when the folder cannot be written to."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run folder {self._path.parent}: {error}; make it writable, or choose another "
                f"run.dir"
            ) from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.forget()

    def forget(self) -> None:
        """Close this process's copy of the lock; the file stays, because removing it would race with the next owner."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"cannot lock {self._path}: {error}; choose a run.dir on a file system that has flock"
                ) from error
            raise RunLockedError(
                f"cannot use the run folder {self._path.parent}: {_owner(descriptor)} is using it; wait for it to "
                f"end, stop it, or choose another run.dir"
            ) from None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "start": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        except OSError as error:
            raise ConfigError(f"cannot write to {self._path}: {error}; free some space there") from error


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, started {owner['start']},"
    except (ValueError, KeyError, TypeError):
        return "another process"


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
