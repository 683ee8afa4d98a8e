"""What tests of several parts look at."""

import os
from pathlib import Path

import pytest


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
