"""The run folder: where everything of a run lies, and what a fresh start does with what lies there."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.checkpoint.durable import fsync_folder, make_folder, replace_durably
from tidemill.checkpoint.manifest import library_versions
from tidemill.errors import ConfigError, TidemillError
from tidemill.recorders.page.source import read_json

__all__ = ["RunFolder"]

_KEPT = ("lock", "attempt")


class RunFolder:
    """Paths of one run. Making it creates the folder, durably. Raises ConfigError when nothing can be written there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        probe = root / f".probe-{os.getpid()}"
        try:
            make_folder(root)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"cannot write into the run folder {root}: {error.strerror or error}; choose another run.dir"
            ) from error
        self.checkpoints = root / "checkpoints"
        self.rollouts = root / "rollouts"
        self.export = root / "export"
        self.summary = root / "summary.json"
        self.manifest = root / "manifest.json"
        self.plan = root / "plan.json"

    def set_aside(self) -> Path | None:
        """Move everything of earlier starts into `aside-N` in the same folder; None when there is nothing."""
        earlier = [p for p in self.root.iterdir() if p.name not in _KEPT and not p.name.startswith("aside-")]
        if not earlier:
            return None
        number = 1
        while (self.root / f"aside-{number}").exists():
            number += 1
        target = self.root / f"aside-{number}"
        try:
            make_folder(target)
            for path in earlier:
                path.rename(target / path.name)
            # The new names first: a power cut may leave a thing in both places, never in none.
            fsync_folder(target)
            fsync_folder(self.root)
        except OSError as error:
            raise TidemillError(
                f"cannot move what {self.root} holds to {target.name}: {error}; nothing is lost: mend it and start "
                "again, or choose another run.dir"
            ) from error
        return target

    def write_manifest(self, *, settings: Mapping[str, Any], attempt: int, command: Sequence[str], device: str) -> None:
        """What runs: effective settings with origins, versions, command; and when each attempt started."""
        earlier = read_json(self.manifest).get("starts")
        starts = earlier if isinstance(earlier, list) else []
        self._write(
            self.manifest,
            {
                "settings": settings,
                "versions": library_versions(),
                "attempt": attempt,
                "started": time.time(),
                "starts": [*starts, {"attempt": attempt, "time": time.time()}],
                "command": list(command),
                "device": device,
                "python": sys.executable.rsplit("/", 1)[-1],
            },
        )

    def write_plan(self, values: Mapping[str, Any]) -> None:
        """plan.json: what memory was planned at this start; empty when nobody could plan."""
        self._write(self.plan, values)

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """summary.json: the figures that a program reads when the run has ended."""
        self._write(self.summary, values)

    def _write(self, path: Path, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=1, allow_nan=False, default=str) + "\n"
        try:
            replace_durably(path, text.encode(), faults="run-folder")
        except OSError as error:
            raise TidemillError(
                f"cannot write {path}: {error}; what was saved is safe: free the disk or make the folder writable, and "
                "start the same command again"
            ) from error
