"""A rank's pieces of a snapshot, written by that rank's worker while the driver looks on."""

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tidemill.cluster.failures import raise_failure
from tidemill.cluster.snapshot_desk import Writing
from tidemill.contracts.checkpoint import Places, Shard, TensorSpec, WrittenFile
from tidemill.contracts.workers import WorkerGroup
from tidemill.errors import CheckpointError

__all__ = ["RemoteShard"]

_FIRST, _LONGEST = 0.002, 0.2  # seconds between looks at a file that grows: short ones are soon written
_STILL = 0.25  # seconds after which one that does not grow is told of too, so that who waits may stop
_LET_GO = 10.0  # seconds for the worker to let go of a file that nobody waits for


class RemoteShard:
    """Implements `Shard` over snapshot number `token` of worker `worker`, whose service has a `SnapshotDesk`.

    `path` is one that the worker sees too. Each question is answered beside what the worker does; `deadline` is how
    many seconds it may take for that.
    """

    def __init__(
        self, group: WorkerGroup, *, worker: int, token: int, specs: Mapping[str, TensorSpec], deadline: float
    ) -> None:
        self._group = group
        self._worker = worker
        self._token = token
        self._specs = specs
        self._deadline = deadline

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See Shard."""
        return self._specs

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """See Shard. When `advance` raises, the worker has let go of `path` before that goes on, or is said not to."""
        file: WrittenFile = self._follow("write_shard", advance, str(path), path, tuple(last), tuple(self._specs))
        return file

    def some(self, names: Collection[str]) -> Shard:
        """See Shard."""
        specs = {name: spec for name, spec in self._specs.items() if name in names}
        return RemoteShard(self._group, worker=self._worker, token=self._token, specs=specs, deadline=self._deadline)

    def place(self, places: Places, advance: Callable[[int], None], *, last: bool = False) -> int:
        """See Placer."""
        mine = {name: place for name, place in places.items() if name in self._specs}
        count: int = self._follow("place_shard", advance, "its files", mine, last)
        return count

    def differing(self, places: Places, advance: Callable[[int], None]) -> str:
        """See Placer."""
        mine = {name: place for name, place in places.items() if name in self._specs}
        name: str = self._follow("compare_shard", advance, "its files", mine)
        return name

    def _follow(self, method: str, advance: Callable[[int], None], what: str, *arguments: object) -> Any:
        """Have the worker do `method`, and look on until it has; what its shard returned."""
        self._ask(method, *arguments)
        told, moved, pause = 0, time.monotonic(), _FIRST
        while True:
            now: Writing = self._ask("shard_state")
            if now.written > told or now.ended or time.monotonic() - moved > _STILL:
                self._tell(advance, now.written - told, what)
                told, moved = now.written, time.monotonic()
            if now.ended:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if now.failure is not None:
            raise_failure(self._group.names[self._worker], now.failure)
        return now.value

    def _tell(self, advance: Callable[[int], None], count: int, what: str) -> None:
        try:
            advance(count)
        except BaseException as stop:
            try:
                self._abandon(what)
            except Exception as second:
                stop.add_note(f"{second}")
            raise

    def _abandon(self, what: str) -> None:
        self._ask("abandon_shard")
        ends = time.monotonic() + _LET_GO
        while not self._ask("shard_state").ended:
            if time.monotonic() > ends:
                raise CheckpointError(
                    f"{self._group.names[self._worker]} has not let go of {what} after {_LET_GO:.0f} s; see its disk"
                )
            time.sleep(_LONGEST / 10)

    def _ask(self, method: str, *arguments: object) -> Writing:
        answer: Writing = self._group.control(self._worker, method, self._token, *arguments, deadline=self._deadline)
        return answer
