"""Files read, and new ones written, in large pieces from any thread, past the page cache where that is possible."""

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from tidemill.checkpoint.durable import sync

__all__ = ["ALIGNMENT", "DirectFile", "open_direct"]

ALIGNMENT = 4096
"""Of what is written: where it begins in the file, its size, and its address."""

_NOT_TAKEN = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_ROOM_KEPT = (*_NOT_TAKEN, errno.ENOSYS)


def open_direct(path: Path) -> int:
    """A descriptor to read `path` with, as direct as the file system takes it. Raises OSError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NOT_TAKEN:
            raise
    return os.open(path, os.O_RDONLY)


class DirectFile:
    """Exists, with room for `size` bytes, from the first moment. `direct` says whether it went past the page cache.

    Where that is refused, at the beginning or later, the file is written as any other. Close it in any case.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Create `path`, which must not exist. Raises OSError, for a full disk where the file system can tell."""
        self._size = size
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Asked of `open`, a file system that refuses would have created the file nevertheless.
            self.direct = self._ask(os.O_DIRECT)
            self._keep_room()
        except BaseException:
            self.close()
            raise

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` from byte `start` on, both multiples of ALIGNMENT; what is beyond the size is cut later.

        Raises OSError.
        """
        while len(data):
            direct = self.direct
            try:
                count = os.pwrite(self._descriptor, data, start)
            except OSError as error:
                # Another thread may have found out in the meantime.
                if not direct or error.errno not in _NOT_TAKEN:
                    raise
                self.direct = self._ask(0)
                continue
            start, data = start + count, data[count:]

    def finish(self, fault: str) -> None:
        """Give it its size and make it durable, save for its name. `fault` names the fault point passed before that."""
        if self._size % ALIGNMENT:
            os.ftruncate(self._descriptor, self._size)
        sync(self._descriptor, fault=fault)

    def close(self) -> None:
        """Without making anything durable."""
        os.close(self._descriptor)

    def _ask(self, flag: int) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag)
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            return False
        return bool(flag)

    def _keep_room(self) -> None:
        """A full disk is found before the first byte, and what is written later lies together."""
        # os.posix_fallocate would imitate what a file system cannot do, by a write into every block of the file.
        while self._size and _fallocate(self._descriptor, 0, 0, self._size) != 0:
            code = ctypes.get_errno()
            if code in _NO_ROOM_KEPT:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
