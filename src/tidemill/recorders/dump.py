"""Every rollout of a training step, whole, in `rollouts/` of the run folder: to study, and to train on again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.checkpoint.durable import fsync_file, fsync_folder
from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Event, Learned
from tidemill.rollout.dump import RolloutDump

__all__ = ["DumpSink"]


class DumpSink:
    """Implements `Sink` for `rollout.dump = true`. A step that is done again after a resume is written again, equal.

    `sampling` is how the answers of the run are sampled.
    """

    name = "dump"

    def __init__(self, *, folder: Path, sampling: Sampling) -> None:
        self._dump = RolloutDump(folder, sampling=sampling, otherwise="set rollout.dump = false")
        self._fresh: list[Path] = []

    def write(self, step: int, event: Event) -> None:
        """Keep what was learned from, with its advantages."""
        if isinstance(event, Learned) and event.groups:
            self._fresh.append(self._dump.write(step, event.groups, event.advantages(), event.trainer_logprobs()))

    def flush(self) -> None:
        """Nothing: files are whole when written."""

    def end_step(self, step: int) -> None:
        """Nothing is pending."""

    def state(self) -> Mapping[str, Any]:
        """Makes durable what was written since the last time: files are whole when written, there is no state."""
        for path in self._fresh:
            fsync_file(path)
        if self._fresh:
            fsync_folder(self._dump.folder)
            fsync_folder(self._dump.folder.parent)  # the first file came with the folder itself
        self._fresh.clear()
        return {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Later files stay until their step writes them again: the same rollouts, bit for bit."""

    def close(self) -> None:
        """Nothing is open."""
