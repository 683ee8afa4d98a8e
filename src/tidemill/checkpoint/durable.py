"""Files and folders that survive a power cut: the only place that calls fsync, and how folders are made and removed."""

import errno
import os
import shutil
from pathlib import Path

from tidemill.faults import point, skipped

__all__ = [
    "free_bytes",
    "fsync_file",
    "fsync_folder",
    "full_in_words",
    "is_full",
    "make_folder",
    "remove_tree",
    "replace_durably",
    "sync",
    "write_all",
    "write_durably",
]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, the quota or the largest file size is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def full_in_words(error: OSError) -> str:
    """Which of them it is: more disk helps against one only."""
    match error.errno:
        case errno.EFBIG:
            return "a file may not become so large here (a limit of the file system, or of this process: ulimit -f)"
        case errno.EDQUOT:
            return "the quota is used up"
        case _:
            return "the disk is full"


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process can still write to the file system of `folder`."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def sync(descriptor: int, *, fault: str) -> None:
    """Make what was written to a file durable. `fault` names the fault point passed before it."""
    point(fault)
    if not skipped(fault):
        os.fsync(descriptor)


def fsync_file(path: Path) -> None:
    """Make what was written to `path` durable; its name is the folder's matter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems keep no directory buffers and answer EINVAL: there is nothing to flush.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and what is missing above it, durably; one that is there already is fine."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync_folder(path.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte: one `write` may take fewer."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def write_durably(path: Path, data: bytes, *, fault: str, fsync_fault: str) -> None:
    """Create `path`, which must not exist, with `data`, and fsync it. The folder's entry is the caller's to fsync.

    `fault` and `fsync_fault` name the fault points passed before writing and before fsync.
    """
    point(fault)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, data)
        sync(descriptor, fault=fsync_fault)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes, *, faults: str) -> None:
    """Give `path` the content `data`: a crash leaves the old or the new one, an exception the old one.

    For one writer at a time: what a killed one left beside it is cleared. Passes the fault points `<faults>.write` and
    `<faults>.fsync`.
    """
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        write_durably(temporary, data, fault=f"{faults}.write", fsync_fault=f"{faults}.fsync")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all in it; a folder that is not there is fine."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
