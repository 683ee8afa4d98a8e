"""Texts of a checkpoint, read from a folder that need not be ours: nothing in it may hang or fill this process."""

import os
import stat
from pathlib import Path

from tidemill.errors import CheckpointError
from tidemill.units import GIB, format_bytes

__all__ = ["LARGEST_TEXT", "read_text_file"]

LARGEST_TEXT = GIB
"""Bytes. A manifest has some hundred for each tensor of each rank."""


def read_text_file(path: Path) -> bytes:
    """What a regular file holds. Raises CheckpointError for anything else by that name and for too much, OSError."""
    _check(path, path.stat())
    # Another one may have the name by now, and a pipe's reader would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor))
        return file.read(LARGEST_TEXT)


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path.name} is no regular file")
    if found.st_size > LARGEST_TEXT:
        raise CheckpointError(f"{path.name} has {format_bytes(found.st_size)}, more than any that was written")
