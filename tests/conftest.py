"""What tests of several parts look at."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import faults


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    """Whoever was a worker for a test is the driver again after it: fault points count by process."""
    yield
    if faults._process != "driver":
        faults.as_process("driver", "")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that were fsynced, in order, by their names at that moment."""
    found: list[Path] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", watched)
    return found
