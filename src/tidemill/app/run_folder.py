"""The run folder: where everything of a run lies, and what a fresh start does with what lies there."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError

__all__ = ["RunFolder", "library_versions"]

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
_KEPT = ("lock", "attempt")


def library_versions() -> dict[str, str]:
    """Versions of Python, Tidemill and the libraries whose numbers a run depends on."""
    found = {"python": platform.python_version(), "tidemill": metadata.version("tidemill")}
    return found | {name: metadata.version(name) for name in _LIBRARIES}


class RunFolder:
    """Paths of one run. Making it creates the folder. Raises ConfigError when nothing can be written there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        probe = root / f".probe-{os.getpid()}"
        try:
            root.mkdir(parents=True, exist_ok=True)
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

    def set_aside(self) -> Path | None:
        """Move everything of earlier starts into `aside-N` in the same folder; None when there is nothing."""
        earlier = [p for p in self.root.iterdir() if p.name not in _KEPT and not p.name.startswith("aside-")]
        if not earlier:
            return None
        number = 1
        while (self.root / f"aside-{number}").exists():
            number += 1
        target = self.root / f"aside-{number}"
        target.mkdir()
        for path in earlier:
            path.rename(target / path.name)
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

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """summary.json: the figures that a program reads when the run has ended."""
        self._write(self.summary, values)

    def _write(self, path: Path, values: Mapping[str, Any]) -> None:
        temporary = path.with_suffix(".tmp")  # the lock's holder is the only writer, and clears what a killed one left
        try:
            temporary.write_text(json.dumps(values, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
