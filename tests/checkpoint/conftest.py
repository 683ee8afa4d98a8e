"""A run without a model: a part with tensors, a part without, and the manager that saves them."""

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.pieces import shards_of

from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import Places, Saved, Shard, Snapshot, TensorBytes, WrittenFile
from tidemill.contracts.events import CheckpointEvent, Event, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError


class OpenGate:
    """Allows everything."""

    def open(self, part: Part) -> None:
        """Nothing to do."""

    def close(self, part: Part) -> None:
        """Nothing to do."""

    def check(self, part: Part, doing: str) -> None:
        """Allowed."""


class FakeWorker:
    """A rank: `fault(path, tell)` is called before it writes, and may fail, die or hang instead of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fault: Callable[[Path, Callable[[int], None]], None] = lambda path, tell: None


class FakeRemote:
    """A Shard that its worker writes."""

    def __init__(self, worker: FakeWorker, shard: LocalShard) -> None:
        self.worker = worker
        self.shard = shard
        self.specs = shard.specs

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """See Shard."""
        self.worker.fault(path, advance)
        return self.shard.write(path, advance, last=last)

    def some(self, names: Collection[str]) -> Shard:
        """See Shard."""
        return FakeRemote(self.worker, LocalShard({name: self.shard._tensors[name] for name in names}))

    def place(self, places: Places, advance: Callable[[int], None], *, last: bool = False) -> int:
        """See Placer."""
        self.worker.fault(next(iter(places.values())).path, advance)
        return self.shard.place(places, advance, last=last)

    def differing(self, places: Places, advance: Callable[[int], None]) -> str:
        """See Placer."""
        return self.shard.differing(places, advance)


class FakeTrainer:
    """Two tensors that follow from the number of updates alone. Snapshots are copies and are counted."""

    name = "trainer"
    gate = OpenGate()

    def __init__(self, size: int = 1000, ranks: int = 0, replicas: int = 1) -> None:
        """`ranks` 0 is one process: no shards. Each of `replicas` is cut over equally many ranks; the first writes."""
        self.size = size
        self.spread = {"ranks": ranks, "replicas": replicas} if ranks else {}
        self.workers = [FakeWorker(rank) for rank in range(ranks // replicas)]
        self.updates = 0
        self.data = self.wanted(0)
        self.parts = Part.ALL
        self.held = 0
        self.leases = 0

    def wanted(self, updates: int) -> dict[str, bytes]:
        """The bytes after so many updates."""
        seed = hashlib.sha256(str(updates).encode()).digest()
        return {"model/w": (seed * (self.size // 8))[: self.size * 4], "optimizer/exp_avg/w": seed[::-1] * 4}

    def step(self) -> None:
        """One update."""
        self.updates += 1
        self.data = self.wanted(self.updates)

    def resident(self) -> Part:
        """What the test set."""
        return self.parts

    def footprint(self, part: Part) -> int:
        """Fixed."""
        return 1

    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def wake_up(self, part: Part) -> Moved:
        """Bring back."""
        self.parts |= part
        return Moved()

    def sleep(self) -> Moved:
        """Give back."""
        self.parts = Part.NONE
        return Moved()

    def snapshot(self) -> Snapshot:
        """A copy."""
        self.held += 1
        released = threading.Event()

        def release() -> None:
            if not released.is_set():
                released.set()
                self.held -= 1

        extra = {"updates": self.updates, **self.spread}
        if self.workers:
            arrays: dict[str, Any] = {name: np.frombuffer(data, dtype=np.float32) for name, data in self.data.items()}
            cut = zip(self.workers, shards_of(arrays, len(self.workers)), strict=True)
            return Snapshot(shards=[FakeRemote(*pair) for pair in cut], extra=extra, release=release)
        tensors = {
            name: TensorBytes(dtype="F32", shape=(len(data) // 4,), data=memoryview(bytearray(data)))
            for name, data in self.data.items()
        }
        return Snapshot(tensors=tensors, extra=extra, release=release)

    def load(self, saved: Saved) -> None:
        """Strict."""
        if set(saved.tensors) != set(self.data) or "updates" not in saved.extra:
            raise CheckpointError("cannot load: other names")
        if any(tensor.data.nbytes != len(self.data[name]) for name, tensor in saved.tensors.items()):
            raise CheckpointError("cannot load: other shapes")
        self.data = {name: bytes(tensor.data) for name, tensor in saved.tensors.items()}
        self.updates = saved.extra["updates"]


class FakeNotes:
    """A part of JSON alone."""

    name = "recorder"

    def __init__(self) -> None:
        self.lines: list[int] = []

    def snapshot(self) -> Snapshot:
        """A copy."""
        return Snapshot(extra={"lines": list(self.lines)})

    def load(self, saved: Saved) -> None:
        """Strict."""
        if saved.tensors or set(saved.extra) != {"lines"}:
            raise CheckpointError("cannot load: other names")
        self.lines = list(saved.extra["lines"])


class FakeResidency:
    """Counts leases."""

    def __init__(self) -> None:
        self.leases: list[str] = []

    @contextmanager
    def awake(self, tenant: FakeTrainer, part: Part = Part.ALL) -> Iterator[None]:
        """Wakes."""
        self.leases.append(tenant.name)
        tenant.wake_up(part)
        yield

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class Rig:
    """One start of a run: `run(to)` trains to that step, saving when due."""

    folder: Path
    options: dict[str, Any]
    trainer: FakeTrainer
    notes: FakeNotes = field(default_factory=FakeNotes)
    residency: FakeResidency = field(default_factory=FakeResidency)
    events: list[Event] = field(default_factory=list)
    state: RunState = field(init=False)

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {
            "every": 2,
            "last_step": 1000,
            "mode": "sync",
            "keep_last": 2,
            "keep_every": 0,
            "on_failure": "stop",
            "walk_back": True,
            "accept": (),
            "identity": {"model": "a", "data": "b"},
            "settings": {"model": "folder"},
            "attempt": 1,
            "seed": 7,
            "grace": 5.0,
            "emit": self.events.append,
        }
        attempt = (defaults | self.options)["attempt"]
        self.state = RunState(step=0, attempt=attempt, seed=7, cursor=Cursor(), warm_up_cursor=Cursor())
        self.manager = CheckpointManager(
            folder=self.folder,
            stateful=(self.trainer, self.notes),
            trainer=self.trainer,
            residency=self.residency,
            **defaults | self.options,
        )

    def restore(self) -> RunState | None:
        """Restore, and go on from there."""
        state = self.manager.restore()
        self.state = state or self.state
        return state

    def step(self) -> None:
        """One update, saved when due."""
        self.trainer.step()
        self.notes.lines.append(self.trainer.updates)
        self.state = self.state.advance(cursor=Cursor(position=self.state.step + 1))
        self.manager.save_if_due(self.state)

    def run(self, to: int) -> None:
        """Updates up to step `to`, then drain."""
        while self.state.step < to:
            self.step()
        self.manager.drain()

    def is_at(self, step: int) -> bool:
        """Whether every part is exactly as after `step` updates."""
        whole = self.trainer.data == self.trainer.wanted(step) and self.notes.lines == list(range(1, step + 1))
        return whole and self.state.step == self.trainer.updates == self.state.cursor.position == step

    def names(self) -> list[str]:
        """What lies in the folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def warnings(self) -> list[str]:
        """Texts of warnings so far."""
        return [event.text for event in self.events if isinstance(event, Notice) and event.level == "warning"]

    def statuses(self, status: str) -> list[int]:
        """Steps of checkpoint events of one status."""
        return [event.step for event in self.events if isinstance(event, CheckpointEvent) and event.status == status]


MakeRig = Callable[..., Rig]


@pytest.fixture
def ranks() -> int:
    """How many ranks the trainer has; 0 is one process without shards. A module may override it."""
    return 0


@pytest.fixture
def make_rig(tmp_path: Path, ranks: int) -> MakeRig:
    """Start a run: settings by name; `folder` is the run's own unless given, `of` ranks in `replicas`."""

    def make(folder: Path | None = None, of: int = ranks, replicas: int = 1, **options: Any) -> Rig:
        return Rig(folder or tmp_path / "checkpoints", options, FakeTrainer(ranks=of, replicas=replicas))

    return make
