"""The limits that saves and loads are compared with: plain writes and reads of so many bytes in the same folder.

Written past the page cache where the file system allows it, from memory that is ready, into room that is kept, a few
blocks under way at once; durable at the end like everything here: fsync of the file and of its folder.
"""

import contextlib
import errno
import math
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tidemill.checkpoint.durable import fsync_file, fsync_folder
from tidemill.units import MIB

__all__ = ["Raw", "drop_from_cache", "folder_bytes", "make_durable"]

_BLOCK = 8 * MIB
_DEPTH = 4
_SOURCE = 256 * MIB
_ALIGNMENT = 4096


class Raw:
    """Writes and reads without contents that matter. `direct` says whether writes go past the page cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory = mmap.mmap(-1, _SOURCE)
        torch.frombuffer(self._memory, dtype=torch.int64).random_()
        self.direct = _takes_direct(folder, self._memory)

    def write(self, size: int) -> float:
        """Seconds until a new file of `size` bytes, rounded up to 4096, is durable. The file is removed again."""
        path = self._folder / "raw"
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag(self.direct), 0o666)
        try:
            if self.direct:
                _keep_room(descriptor, size)
            self._all(lambda start, view: _written(descriptor, view, start), size)
            os.fsync(descriptor)
            fsync_folder(self._folder)
            return time.perf_counter() - began
        finally:
            os.close(descriptor)
            path.unlink()
            fsync_folder(self._folder)

    def read(self, folder: Path, *, direct: bool, most: float = math.inf) -> float:
        """Seconds to read all files in `folder`, which are not in the page cache; by the rate of `most` bytes of them.

        Past the page cache a few blocks at once, as far as that is allowed there; else one by one, read ahead by the
        system.
        """
        drop_from_cache(folder)
        began, whole, left = time.perf_counter(), folder_bytes(folder), min(most, folder_bytes(folder))
        wanted = left
        for path in _files(folder):
            size = min(path.stat().st_size, int(left))
            left -= size
            descriptor = os.open(path, os.O_RDONLY | self._flag(direct and self.direct))
            try:
                self._all(
                    lambda start, view, file=descriptor: os.preadv(file, [view], start),  # type: ignore[misc]
                    size,
                    whole=True,
                    depth=_DEPTH if direct else 1,
                )
            finally:
                os.close(descriptor)
        return (time.perf_counter() - began) * whole / wanted

    def _all(
        self, work: Callable[[int, memoryview], object], size: int, *, whole: bool = False, depth: int = _DEPTH
    ) -> None:
        """`work` on each block and its place; `whole` blocks also at the end."""
        view = memoryview(self._memory)

        def one(start: int) -> None:
            place = start % _SOURCE
            work(start, view[place : place + (_BLOCK if whole else min(_BLOCK, size - start))])

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(one, range(0, size, _BLOCK)))

    @staticmethod
    def _flag(direct: bool) -> int:
        return os.O_DIRECT if direct else 0


def _written(descriptor: int, view: memoryview, start: int) -> None:
    if (count := os.pwrite(descriptor, view, start)) != len(view):
        raise OSError(errno.EIO, f"{count} of {len(view)} bytes were written")


def _keep_room(descriptor: int, size: int) -> None:
    """Else a file that grows takes one write at a time; where that cannot be asked for, it does."""
    with contextlib.suppress(OSError):
        os.posix_fallocate(descriptor, 0, size)


def _takes_direct(folder: Path, memory: mmap.mmap) -> bool:
    path = folder / "probe"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
        try:
            os.pwrite(descriptor, memoryview(memory)[:_ALIGNMENT], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def make_durable(folder: Path) -> None:
    """Fsync every file in `folder`, every folder in it, itself, and the one that it lies in."""
    for path in _files(folder):
        fsync_file(path)
    for inner in {path.parent for path in _files(folder)} | {folder, folder.parent}:
        fsync_folder(inner)


def drop_from_cache(folder: Path) -> None:
    """Nothing of the durable files in `folder` is in the page cache afterwards, unless somebody has mapped it."""
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def folder_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
