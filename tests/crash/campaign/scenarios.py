"""Ways to run that are killed, and of each what a run that nobody kills does."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.crash.campaign.disk_trace import LOG
from tests.crash.campaign.inside import Inside, no_fault
from tests.crash.campaign.inspection import Files, Version, files, version
from tests.crash.small_run import STEPS, Outcome, outcome, recipe, start

LIMIT = 240.0  # seconds of a start
RANKS = (
    "cluster.use=tests.crash.small_parcels:SmallParcelsSettings", "trainer.ranks=2", "residency.park_groups=always",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`settings` are those of checkpoints, without the prefix; `more` are others.

    `slow` seconds go by before each block of a file is written.
    """

    name: str
    settings: tuple[str, ...]
    more: tuple[str, ...] = ()
    ranks: int = 1
    slow: float = 0.0

    def words(self, base: Path, run: Path) -> list[str]:
        """The command line that starts it in `run`."""
        path = recipe(base, run)
        ranks = RANKS if self.ranks > 1 else ()
        return ["run", str(path), *ranks, *(f"checkpoint.{word}" for word in self.settings), *self.more]


_KEPT = ("every=3", "keep_last=2")
_TRIAL = ("trial=true", "export_every=6")
_BEST = ("every=2", "keep_last=1", "keep_every=4", "keep_best=-train/padding_fraction", "at_epoch_end=true")
SCENARIOS = (
    Scenario(name="async, two kept, trial, exports", settings=("mode=async", *_KEPT, *_TRIAL)),
    Scenario(name="async, each step, one kept", settings=("mode=async", "every=1", "keep_last=1")),
    Scenario(name="async, slow disk", settings=("mode=async", "every=2", "keep_last=2"), slow=0.2),
    Scenario(name="sync, one kept", settings=("mode=sync", "every=2", "keep_last=1")),
    Scenario(name="sync, every fourth and the best kept", settings=("mode=sync", *_BEST)),
    Scenario(name="two ranks, async, trial, exports", settings=("mode=async", *_KEPT, *_TRIAL), ranks=2),
    Scenario(name="two ranks, sync, one kept", settings=("mode=sync", "every=2", "keep_last=1"), ranks=2),
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`versions` and `exports` are what each step must hold, where there is any. `points` are those passed, each with
    its process, and how often; `operations` those on the disk.
    """

    outcome: Outcome
    versions: Mapping[int, Version]
    exports: Mapping[int, Files]
    points: Mapping[str, int]
    operations: int
    seconds: float


Fault = Callable[[], object]


def unkilled(scenario: Scenario, base: Path, run: Path, *, traced: bool = False, fault: Fault = no_fault) -> Inside:
    """Run it to its end in the new folder `run`; the notes of it. Raises AssertionError when it does not end well."""
    run.mkdir()
    log, notes = base / f"{run.name}.log", base / f"{run.name} notes"
    inside = Inside(run=run, notes=notes, traced=traced, slow=scenario.slow, fault=fault)
    process = start(scenario.words(base, run), log, inside=inside)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    return inside


def reference(scenario: Scenario, base: Path) -> Reference:
    """What `scenario` comes to, and what each step of it holds. Raises AssertionError when that is not one thing."""
    each = ("mode=sync", "every=1", "keep_last=1000", "export_every=1")
    every = Scenario(name="", settings=each, ranks=scenario.ranks)
    kept = base / f"every step, {scenario.ranks} ranks"
    if not kept.exists():
        unkilled(every, base, kept)
    run = base / scenario.name
    began = time.monotonic()
    inside = unkilled(scenario, base, run, traced=True)
    seconds = time.monotonic() - began
    assert outcome(run) == outcome(kept), f"{scenario.name} differs from a run that saves each step"
    return Reference(
        outcome=outcome(run),
        versions={step: version(kept / "checkpoints" / f"step-{step:08d}") for step in range(1, STEPS + 1)},
        exports={step: files(kept / "export" / f"step-{step:08d}") for step in range(1, STEPS + 1)},
        points=Counter(inside.points),
        operations=_operations(inside),
        seconds=seconds,
    )


def _operations(inside: Inside) -> int:
    return len((inside.notes / "trace" / LOG).read_text().splitlines())
