"""One pair of trainer and engine, in one process or two, between which weights are handed over again and again."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.bus import synchronise
from benchmarks.figures import Figure
from benchmarks.weights.limits import Limits, hash_figures, limits_of
from benchmarks.weights.sides import (
    Case,
    ProbedReceiver,
    ProbedSource,
    Receiver,
    Source,
    make_receiver,
    make_source,
)
from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.feeding import Feeding
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.contracts.events import Event, PhaseDone
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import Samples, WeightSync
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.manager import LeaseManager
from tidemill.testing.spawned import SpawnedGroup
from tidemill.weights.direct import DirectWeightSync
from tidemill.weights.samples import WeightsInTurn, every_weight, no_weight

__all__ = ["MODES", "in_one_process", "in_two_processes"]

MODES: dict[str, Samples] = {"always": every_weight, "sampled": WeightsInTurn(within=8), "off": no_weight}
_DEADLINES = Deadlines(work=300.0, transition=60.0, control=60.0)


@dataclass
class _Measured:
    seconds: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)


class _Pair:
    """Hands over in every mode in turn. `again` changes the trainer's weights."""

    def __init__(self, trainer: Any, engine: Any, device: str, words: bool, make: Callable[..., WeightSync]) -> None:
        self.trainer, self.engine, self.device = trainer, engine, torch.device(device)
        residency = LeaseManager(budget=NO_LIMIT, emit=self._note, deadline=60.0)
        residency.admit(trainer)
        self.residency = residency
        self.syncs = {
            mode: make(residency=residency, emit=self._note, samples=samples, words=words)
            for mode, samples in MODES.items()
        }
        self.measured = {mode: _Measured() for mode in MODES}
        self._verify = 0.0
        self._step = 0

    def _note(self, event: Event) -> None:
        if isinstance(event, PhaseDone) and event.name == "verify":
            self._verify = event.seconds

    def hand_over(self, mode: str, *, change: bool = True) -> float:
        """One hand-over of weights other than before: its seconds."""
        self._step += 1
        with self.residency.awake(self.trainer):
            if change:
                self.trainer.begin(str(0.01 * self._step))
            synchronise(self.device)
            began = time.perf_counter()
            self.syncs[mode].update_weights(self.trainer, self.engine, PolicyVersion(1, self._step))
            synchronise(self.device)
            return time.perf_counter() - began

    def measure(self, cycles: int) -> None:
        for _ in range(cycles):
            for mode, measured in self.measured.items():
                measured.seconds.append(self.hand_over(mode))
                measured.verify.append(self._verify)

    def whole(self) -> bool:
        """Whether the mode that compares nothing hands over what the one that compares all then finds unchanged."""
        self.hand_over("off")
        with self.residency.awake(self.engine):
            held = dict(self.engine.weight_checksums())
        self.hand_over("always", change=False)
        with self.residency.awake(self.engine):
            return dict(self.engine.weight_checksums()) == held


def _figures(case: Case, carrier: str, pair: _Pair, limits: Limits, extra: float, verified: bool) -> list[Figure]:
    make = functools.partial(Figure, benchmark="weights", case=case.name, verified=verified)
    found = []
    for mode, measured in pair.measured.items():
        for cycle, seconds, verify in (
            ("first", measured.seconds[0], measured.verify[0]),
            ("median", statistics.median(measured.seconds[1:]), statistics.median(measured.verify[1:])),
        ):
            told = functools.partial(make, arm=f"{carrier}-{mode}", cycle=cycle)
            found += [
                told(metric="seconds", value=seconds, unit="s"),
                told(metric="rate", value=case.nbytes() / seconds / 1e9, unit="1e9 bytes/s"),
                told(metric="copy_ratio", value=limits["copy"] / seconds, unit="of a device copy"),
                told(metric="verify", value=verify, unit="s"),
            ]
    times = {mode: statistics.median(measured.seconds[1:]) for mode, measured in pair.measured.items()}
    for mode in ("always", "sampled"):
        share = 1 - times["off"] / times[mode]
        found.append(
            make(arm=f"{carrier}-{mode}", metric="verify_share", value=share, unit="of its time", cycle="median")
        )
    if case.device == "cuda":
        found.append(make(arm=carrier, metric="peak_extra", value=extra, unit="bytes", cycle="first"))
        ratio = extra / case.nbytes()
        found.append(make(arm=carrier, metric="peak_extra_ratio", value=ratio, unit="of the engine's", cycle="first"))
    return found


def in_one_process(pipe: Connection, case: Case, cycles: int) -> None:
    """The life of the process in which trainer and engine are; sends figures: of limits, checksums and hand-overs."""
    if case.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device(case.device)
    before = limits_of(case.nbytes(), device)
    source, receiver = Source(case), Receiver(case)
    pair = _Pair(source, receiver, case.device, case.device == "cuda", DirectWeightSync)
    pair.measure(cycles)
    extra = 0.0
    if case.device == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pair.hand_over("always")
        extra = float(torch.cuda.max_memory_allocated() - held)
    equal = all(
        torch.equal(receiver.views[name], weight.to(receiver.views[name].dtype))
        for name, weight in source.weights.items()
    )
    verified = equal and pair.whole()
    checksum_figures = hash_figures(case.name, source, receiver, before)
    figures = _figures(case, "direct", pair, before, extra, verified)
    del source, receiver, pair
    after = limits_of(case.nbytes(), device)
    pipe.send((_limit_figures(case, before, after) + checksum_figures + figures, before))


def _limit_figures(case: Case, before: Limits, after: Limits) -> list[Figure]:
    make = functools.partial(Figure, benchmark="weights", arm="limit", case=case.name, cycle="median", verified=True)
    size = case.nbytes()
    found = [make(metric=f"{name}_rate", value=size / before[name] / 1e9, unit="1e9 bytes/s") for name in before]
    drift = max(abs(after[name] / before[name] - 1) for name in before)
    return [*found, make(metric="drift", value=drift, unit="of itself")]


class _OverHost(ShippedWeightSync):
    """Through host memory, also where the GPU is shared."""

    def _feeding(self, trainer: TrainerProxy, engine: EngineProxy) -> Feeding:
        return replace(super()._feeding(trainer, engine), carrier=("bytes",))


def in_two_processes(case: Case, carrier: str, cycles: int, limits: Limits) -> list[Figure]:
    """Figures of a rank and a replica in a process each, which share the GPU where there is one."""
    groups = [SpawnedGroup(role, 1) for role in ("trainer", "engine")]
    try:
        groups[0].build(functools.partial(ProbedSource, functools.partial(make_source, case)), meet=False)
        groups[1].build(functools.partial(ProbedReceiver, functools.partial(make_receiver, case)), meet=False)
        trainer = TrainerProxy(groups[0], deadlines=_DEADLINES)
        engine = EngineProxy(groups[1], deadlines=_DEADLINES, emit=_ignore, max_batch=1)
        make = _OverHost if carrier == "host" else ShippedWeightSync
        pair = _Pair(trainer, engine, "cpu", case.device == "cuda", make)
        pair.measure(cycles)
        extra = 0.0
        if case.device == "cuda":
            (free,) = groups[0].call("watch", deadline=60.0)
            pair.hand_over("always")
            (least,) = groups[0].call("watched", deadline=60.0)
            extra = float(free - least)
        return _figures(case, carrier, pair, limits, extra, pair.whole())
    finally:
        for group in groups:
            group.close()


def _ignore(event: Event) -> None:
    pass
