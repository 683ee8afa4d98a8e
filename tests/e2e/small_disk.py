"""A file system of some MiB under one folder of a run, that a test can fill, and make read-only, at any moment."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["SmallDisk", "small_disk"]


class SmallDisk:
    """Mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "somebody else's"

    def fill(self, leave: int) -> None:
        """Somebody else takes all of it but for `leave` bytes."""
        stat = os.statvfs(self.folder)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)

    def free(self) -> None:
        """They give it back."""
        self._filler.unlink()

    def protect(self, read_only: bool) -> None:
        """Nothing can be written any more; or again."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(self.folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int = 16) -> Iterator[SmallDisk]:
    """With what lies in `folder`, which is as it was before when the block ends. Skips a test that may not mount."""
    kept = folder.with_name(f"{folder.name} before")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, kept)
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs"]
    try:
        subprocess.run(["mount", *options, str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no leave to mount a file system here")
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(kept)
