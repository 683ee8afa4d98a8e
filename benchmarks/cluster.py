"""What several processes cost: starting a private Ray cluster, calling two ranks, telling of one that was killed.

A trainer of two ranks and an engine of one replica, on a tiny model, take turns as in a run. `round_trip` is a call of
both ranks that does nothing. `driver_overhead` is the time of a step on the driver during which neither rank 0 nor the
engine was at work; process groups that are parked and revived, and weights that are gathered, count as overhead. It is
the sum of `transitions` (sleep, wake), `update`, `snapshot`, `weight_sync` and `rollout`, less those at work.
`without_parking` is the same less the time that rank 0 parked and revived. `private_cluster` is Ray alone;
`cluster_start` is Ray and three workers that have imported everything.

    python -m benchmarks.cluster [--steps 30] [--device cpu] [--json FILE]
"""

import argparse
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_shape import write_model
from benchmarks.trainers import PHASE
from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.cluster.ray.cluster import RayCluster
from tidemill.cluster.ray.private import PrivateCluster
from tidemill.contracts.batch import Batch
from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import Emit, Event, PhaseDone, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import WorkerError
from tidemill.residency.manager import LeaseManager
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.weights.samples import every_weight


class Timed:
    """Stands before a part and emits how long each of its calls took."""

    def __init__(self, part: Any, emit: Emit) -> None:
        self.__dict__.update(part=part, emit=emit)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            # Process groups are there for the sake of several processes.
            with phase(self.emit, "overhead" if name in ("park", "revive") else "busy", name):
                return value(*arguments, **named)

        return call


Interval = tuple[float, float]


def covered(intervals: list[Interval], within: Interval) -> float:
    """Seconds of `within` that lie in one of the intervals, which may overlap."""
    seconds, reached = 0.0, within[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, within[1])
        if end > start:
            seconds, reached = seconds + end - start, end
    return seconds


class Watch:
    """When something was done on the driver, by name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Interval]] = {}

    def over(self, name: str, call: Any) -> Any:
        """`call`, watched."""

        def watched(*arguments: Any) -> Any:
            began = time.time()
            try:
                return call(*arguments)
            finally:
                self.seen.setdefault(name, []).append((began, time.time()))

        return watched

    def idle(self, name: str, busy: list[Interval]) -> float:
        """Seconds within `name` in which nobody was at work; transitions within others are counted once, as such."""
        moves = [] if name == "transitions" else self.seen.get("transitions", [])
        return sum(end - start - covered([*busy, *moves], (start, end)) for start, end in self.seen[name])


def ignored(event: Event) -> None:
    """What parts say themselves is not wanted here."""


def timed_trainer(model: Path, dtype: str, place: Place, emit: Emit) -> Any:
    """One rank."""
    trainer = FsdpTrainer(
        model=model, place=place, compute_dtype=dtype, tokens_per_micro_batch=16384, minibatches=1, recompute=False,
        max_grad_norm=1.0, phases={"rl": PHASE}, page_bytes=64 << 20, emit=ignored,
    )  # fmt: skip
    return Timed(trainer, emit)


def timed_engine(model: Path, dtype: str, place: Place, emit: Emit) -> Any:
    """The engine."""
    engine = TransformersEngine(
        model=model, device=place.device, dtype=dtype, max_batch=64, kv_tokens=64 * 32, emit=ignored
    )
    return Timed(engine, emit)


def make_batch() -> Batch:
    """64 rows of 16 tokens."""
    dice = np.random.default_rng(0)
    mask = np.tile(np.arange(16) > 7, 64)
    return Batch(
        token_ids=dice.integers(3, 60, 1024),
        offsets=np.arange(0, 1025, 16),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        advantages=mask.astype(np.float32),
        metrics={},
    )


def killed(trainer: Any, batch: Batch, residency: LeaseManager) -> float:
    """Seconds from SIGKILL of rank 1 until the call under way raises its name."""
    pid = trainer.group.members[1].pid
    with residency.awake(trainer):
        try:
            while True:
                trainer.step(batch, CrossEntropyLoss())
                if pid:
                    began, _ = time.perf_counter(), os.kill(pid, signal.SIGKILL)
                    pid = 0
        except WorkerError as error:
            assert "trainer-1" in str(error), error
            return time.perf_counter() - began


def measured(folder: Path, device: str, steps: int) -> dict[str, float]:
    """All figures, in seconds."""
    model, found = folder / "model", {}
    busy: list[Interval] = []
    parking: list[Interval] = []
    write_model(model, "tiny")
    dtype = "bfloat16" if device == "cuda" else "float32"

    def emit(event: Event) -> None:
        if isinstance(event, PhaseDone):
            (busy if event.name == "busy" else parking).append((event.start, event.start + event.seconds))

    began = time.perf_counter()
    alone = PrivateCluster(cpus=2, gpus=0)
    found["private_cluster"] = time.perf_counter() - began
    alone.close()
    began = time.perf_counter()
    cluster = RayCluster(
        device=device, ranks=2, replicas=1, max_batch=64, seed=0, threads=1, transition_deadline=60.0,
        log_folder=folder / "logs", emit=emit,
    )  # fmt: skip
    found["cluster_start"] = time.perf_counter() - began
    began = time.perf_counter()
    trainer: Any = cluster.trainer(functools.partial(timed_trainer, model, dtype), ranks=2)
    found["two_ranks_built"] = time.perf_counter() - began
    engine = cluster.engine(functools.partial(timed_engine, model, dtype), replicas=1)
    trips = []
    for _ in range(50):
        began = time.perf_counter()
        trainer.group.call("describe", deadline=60.0)
        trips.append(time.perf_counter() - began)
    found["round_trip"] = statistics.median(trips)
    together = max(trainer.footprint(Part.ALL) + engine.footprint(Part.WEIGHTS), engine.footprint(Part.ALL))
    residency = LeaseManager(budget=together, emit=ignored, deadline=60.0)
    residency.admit(trainer)
    weights = cluster.weight_sync(residency, ignored, samples=every_weight)
    batch, requests = make_batch(), [Request(key=str(n), token_ids=(5, 6, 7)) for n in range(16)]
    watch = Watch()
    for part in (trainer, engine):
        part.sleep, part.wake_up = watch.over("transitions", part.sleep), watch.over("transitions", part.wake_up)
    update, snapshot = watch.over("update", trainer.step), watch.over("snapshot", lambda: trainer.snapshot().release())
    sync, rollout = watch.over("weight_sync", weights.update_weights), watch.over("rollout", engine.generate)
    overheads: dict[str, list[float]] = {}
    walls = []
    with residency.awake(trainer):
        trainer.begin("rl")
    for step in range(steps):
        busy.clear()
        parking.clear()
        watch.seen.clear()
        began = time.time()
        with residency.awake(trainer):
            update(batch, CrossEntropyLoss())
            snapshot()
            sync(trainer, engine, PolicyVersion(1, step))
        with residency.awake(engine):
            rollout(requests, Sampling(max_new_tokens=8))
        step_of = (began, time.time())
        walls.append(step_of[1] - began)
        overheads.setdefault("driver_overhead", []).append(walls[-1] - covered(busy, step_of))
        overheads.setdefault("without_parking", []).append(walls[-1] - covered([*busy, *parking], step_of))
        for name in watch.seen:
            overheads.setdefault(name, []).append(watch.idle(name, busy))
    found["step"] = statistics.median(walls[2:])
    found |= {name: statistics.median(seconds[2:]) for name, seconds in overheads.items()}
    found["load"] = os.getloadavg()[0]
    found["killed_rank_reported"] = killed(trainer, batch, residency)
    cluster.close()
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-cluster-") as folder:
        found = measured(Path(folder), arguments.device, arguments.steps)
    lines = [
        {"benchmark": "cluster", "arm": "tidemill", "case": f"two-ranks-{arguments.device}", "metric": name,
         "value": round(value, 5), "unit": "processes" if name == "load" else "seconds", "cycle": "median",
         "verified": True}
        for name, value in found.items()
    ]  # fmt: skip
    for line in lines:
        print(json.dumps(line))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, value in found.items():
        print(f"{name:>22} {value:10.1f}" if name == "load" else f"{name:>22} {value * 1e3:10.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
