"""A whole run of real parts in the test's own process, or with workers of its own, looked at while it goes on."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from tests.crash.small_run import prepare, recipe

from tidemill.app.assemble import assembled
from tidemill.app.build import build_cluster
from tidemill.app.run_folder import RunFolder
from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.cluster.inline import InlineCluster
from tidemill.config.cluster import ClusterSettings
from tidemill.config.kinds import NonNegative
from tidemill.config.load import load
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.events import Event, Notice, PhaseDone, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.contracts.recorder import StepRecord
from tidemill.contracts.residency import Tenant
from tidemill.testing.fakes.meaning import FakeRecorder, FakeStop

__all__ = [
    "SMALL",
    "SPAWNED",
    "SmallCluster",
    "SmallClusterSettings",
    "Watching",
    "moves_of",
    "real_parts",
    "saved_weights",
    "weights_now",
]

SMALL = "tests.residency.real_run:SmallClusterSettings"
SPAWNED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"
REWARD = '''
def score(trajectories):
    """Varies within a group, so that every step moves the weights."""
    return [sum(map(ord, str(t))) % 7 / 7 for t in trajectories]
'''
_WORK = {("train", "trainer"): "trainer.step", ("update_weights", "engine"): "update_weights"}


class SmallClusterSettings(ClusterSettings):
    """This process, on a device with so many bytes free."""

    implementation: ClassVar[str] = "tests.residency.real_run:SmallCluster"

    free: NonNegative = 0
    """Bytes."""


class SmallCluster(InlineCluster):
    """See its settings."""

    def __init__(self, *, free: int, **others: Any) -> None:
        super().__init__(**others)
        self._free = free

    def free_bytes(self) -> int:
        return self._free


class Watching(FakeRecorder):
    """Keeps every event, and calls `at_record` right after an update, within the trainer's lease.

    `done` are the steps that earlier starts recorded.
    """

    def __init__(self, done: int = 0) -> None:
        super().__init__({step: {} for step in range(done)})
        self.at_record: Callable[[int], None] = lambda step: None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[StepRecord]:
        with super().step(step) as record:

            def recorded(**said: Any) -> None:
                record(**said)
                self.at_record(step)

            yield recorded

    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def prepare_learning(base: Path) -> Path:
    """The small run's model and rows, and a reward under which every step changes the weights."""
    prepare(base)
    (base / "reward.py").write_text(REWARD)
    return base


@contextlib.contextmanager
def real_parts(
    base: Path, recorder: Watching, *words: str, place: Callable[[Cluster], Cluster] = lambda cluster: cluster
) -> Iterator[Parts]:
    """Every part as the settings of the small run, and `words`, say. `place` may stand before the cluster."""
    loaded = load([recipe(base, base / "run")], list(words))
    folder = RunFolder(loaded.config.run.dir)
    with contextlib.closing(build_cluster(loaded.config, recorder.emit)) as cluster:
        attempt = next_attempt(folder.root)
        made = assembled(loaded, place(cluster), folder=folder, attempt=attempt, recorder=recorder, stop=FakeStop())
        with made as parts:
            yield parts


def moves_of(events: list[Event], *tenants: Tenant) -> list[str]:
    """Transitions, updates and hand-overs in the order in which they ended; of parts, those that a tenant has.

    A swap is the two transitions that it is.
    """
    present = {tenant.name: [part.words() for part in Part.ALL if tenant.footprint(part)] for tenant in tenants}
    return [move for event in events for move in _moves(event, present)]


def _moves(event: Event, present: dict[str, list[str]]) -> Iterator[str]:
    if isinstance(event, PhaseDone) and (event.name, event.owner) in _WORK:
        yield _WORK[event.name, event.owner]
    if isinstance(event, Transition):
        for one in event.what.split(" and "):
            what, _, parts = one.removesuffix(")").partition("(")
            owner = what.partition(".")[0]
            moved = [part for part in present[owner] if parts == "all" or part in parts.split(", ")]
            yield f"{what}({', '.join(moved)})" if parts else what


def weights_now(parts: Parts) -> dict[str, bytes]:
    """Every weight of the trainer, which must be leased."""
    return {name: tensor.clone().numpy().tobytes() for name, tensor in parts.trainer.named_weights()}


def saved_weights(base: Path, step: int) -> dict[str, bytes]:
    """Every weight in the checkpoint of a step."""
    stored = read_checkpoint(base / "run" / "checkpoints" / f"step-{step:08d}", step=step)
    tensors = stored.parts["trainer"].tensors
    return {
        name.removeprefix("model/"): bytes(tensor.read((0,) * len(tensor.shape), tensor.shape))
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }
