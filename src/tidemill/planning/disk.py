"""What a run writes to its folder, and how long a rollout must be for a save to stay behind it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.planning.model_folder import Model
from tidemill.planning.state import MASTER_BYTES
from tidemill.units import GIB, format_bytes, format_seconds

__all__ = ["Disk", "disk_of"]

# float32 masters and two moments of each.
_COPIES = 3
_EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RATES = (1, 4)  # GiB/s: a disk in the cloud, and one in the machine


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes of one checkpoint and of one export; `at_once` checkpoints lie there together, one in writing included.

    `free` is what the file system of the run folder has for it now; None where nobody knows.
    """

    checkpoint: int
    export: int
    at_once: int
    free: int | None

    @property
    def needed(self) -> int:
        """At most, of checkpoints that are not kept for good, and the export at the end."""
        return self.at_once * self.checkpoint + self.export

    def sentence(self) -> str:
        """For people."""
        times = ", ".join(f"{format_seconds(self.checkpoint / rate / GIB)} at {rate} GiB/s" for rate in _RATES)
        export = f", and an export {format_bytes(self.export)}" if self.export else ""
        there = "" if self.free is None else f"; {format_bytes(self.free)} are free"
        return (
            f"disk: a checkpoint takes {format_bytes(self.checkpoint)}, {self.at_once} of them at once "
            f"{format_bytes(self.at_once * self.checkpoint)}{export}{there}; a save stays behind a rollout that lasts "
            f"as long as it is written: {times}"
        )


def disk_of(config: RunConfig, model: Model) -> Disk:
    """Of the trainer's state, next to which all else in a checkpoint is small."""
    settings = config.checkpoint
    each = _EXPORT_BYTES.get(settings.export_dtype) or _EXPORT_BYTES.get(_base_dtype(model.folder), 4)
    export = each * model.parameters if settings.export else 0
    return Disk(
        checkpoint=_COPIES * MASTER_BYTES * model.parameters,
        export=export,
        at_once=settings.keep_last + 1 + bool(settings.keep_best),
        free=_free(config.run.dir),
    )


def _base_dtype(folder: Path) -> str:
    """As config.json names it; an export has the same."""
    config = json.loads((folder / "config.json").read_bytes())
    return str(config.get("dtype") or config.get("torch_dtype"))


def _free(folder: Path) -> int | None:
    """Of the nearest folder above that exists."""
    for path in (folder.absolute(), *folder.absolute().parents):
        try:
            stat = os.statvfs(path)
        except OSError:
            continue
        return stat.f_bavail * stat.f_frsize
    return None
