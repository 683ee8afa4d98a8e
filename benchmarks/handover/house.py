"""Trainer and engine in one process, which hand one device to each other through the parts that a run has."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import psutil
import torch

from benchmarks.bus import Copies, plain_copies, synchronise, timed
from benchmarks.offload.cases import fingerprint
from benchmarks.outside import files_and_threads, give_back_freed
from benchmarks.trainers import DEADLINE, make_batch, make_trainer, state_of
from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.contracts.engine import Request, RolloutEngine, Sampling
from tidemill.contracts.events import Emit, Event, PhaseDone, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.planning.budget import budget_for
from tidemill.residency.manager import LeaseManager
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.weights.direct import DirectWeightSync

__all__ = ["ENGINES", "Found", "House", "hand_over", "live_with_a_twin"]

Series = dict[str, list[float]]

_BATCHES = 4


ENGINES = ("transformers", "vllm")


def _nothing() -> None:
    pass


def _engine(kind: str, model: Path, device: str, emit: Emit) -> RolloutEngine:
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if device == "cuda" else "float32"
    if kind == "transformers":
        return TransformersEngine(model=model, device=device, dtype=dtype, max_batch=16, kv_tokens=16 * 256, emit=emit)
    from tidemill.engines.vllm.engine import VllmEngine

    return VllmEngine(model=model, device=device, dtype=dtype, max_batch=16, kv_tokens=16 * 256, emit=emit)


class House:
    """Trainer and engine under a budget with room for what must be awake at once, and no more."""

    def __init__(self, model: Path, device: str, engine: str) -> None:
        self.device = torch.device(device)
        self.seconds: Series = {}
        self._trained = 0.0
        # First, as in a run: while it starts it may need the device for itself.
        self.engine = _engine(engine, model, device, self._note)
        self.trainer = make_trainer(model, Place(device=device), self._note)
        budget, _ = budget_for(
            "always",
            trainer_bytes=self.trainer.footprint(Part.ALL),
            engine_weight_bytes=self.engine.footprint(Part.WEIGHTS),
            engine_bytes=self.engine.footprint(Part.ALL),
            device_bytes=0,
        )
        self.residency = LeaseManager(budget=budget, emit=self._note, deadline=DEADLINE)
        self.residency.admit(self.trainer)
        self.sync = DirectWeightSync(residency=self.residency, emit=self._note)
        with self.residency.awake(self.trainer):
            self.trainer.begin("rl")

    def _note(self, event: Event) -> None:
        if isinstance(event, Transition):
            self.seconds.setdefault(event.what, []).append(event.seconds)
        elif isinstance(event, PhaseDone) and event.name == "update_weights":
            self.seconds.setdefault(event.name, []).append(event.seconds)
        elif isinstance(event, PhaseDone) and event.name == "train":
            # Told where the update ends and before the trainer begins to copy anything out.
            self._trained = time.perf_counter()

    def cycle(self, number: int, *, stepped: Callable[[], None] = _nothing) -> dict[str, float]:
        """One hand-over, at whose end the trainer is asleep; what its step reported. `stepped` is called after it."""
        with ExitStack() as lease:
            came = timed(self.device, lambda: lease.enter_context(self.residency.awake(self.trainer)))
            metrics = step(self.trainer, number)
            stepped()
            self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, number))
        with ExitStack() as lease:
            lease.enter_context(self.residency.awake(self.engine))
            synchronise(self.device)
            went = time.perf_counter() - self._trained
            requests = [Request(key=str(row), token_ids=(5, 6, 7)) for row in range(4)]
            self.engine.generate(requests, Sampling(max_new_tokens=8))
        if stepped is _nothing:
            self.seconds.setdefault("whole", []).append(came + went)
        return metrics

    def comes_back_whole(self, number: int) -> bool:
        """One hand-over more: whether all of the state after the next wake is what it was before the sleep."""
        before: list[int] = []
        self.cycle(number, stepped=lambda: before.extend(fingerprint(state_of(self.trainer))))
        with self.residency.awake(self.trainer):
            return fingerprint(state_of(self.trainer)) == before

    def close(self) -> None:
        """No lease from now on, and nothing pinned."""
        self.residency.close()
        self.trainer.close()


def step(trainer: FsdpTrainer, number: int) -> dict[str, float]:
    """One update; its metrics. Lengths come again: what libraries load for new ones is no growth of ours."""
    return dict(trainer.step(make_batch(number % _BATCHES, trainer.vocabulary), CrossEntropyLoss()).metrics)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of the process: seconds by what took them, counts by cycle, plain copies of the trainer's state before, after."""

    seconds: Series
    counts: Series
    bytes: int
    limits: tuple[Copies, Copies]
    verified: bool


def hand_over(pipe: Connection, model: str, size: int, device: str, cycles: int, engine: str) -> None:
    """The life of the process that is measured; it lets itself be looked at in each cycle."""
    if device == "cpu":
        torch.set_num_threads(1)
    before = plain_copies(size, torch.device(device))
    house = House(Path(model), device, engine)
    # Of the first one only the sleep is whole: the trainer is awake from the start.
    house.cycle(0)
    house.seconds["whole"].clear()
    counts: Series = {"host": [], "pages": [], "threads": [], "files": []}
    for number in range(1, cycles + 1):
        house.cycle(number)
        pipe.send("look")
        pipe.recv()
        files, threads = files_and_threads()
        give_back_freed()
        now = {"host": psutil.Process().memory_info().rss, "pages": house.trainer.host_bytes()}
        for name, value in {**now, "threads": threads, "files": files}.items():
            counts[name].append(float(value))
    seconds = {name: list(values) for name, values in house.seconds.items()}
    verified = house.comes_back_whole(cycles + 1)
    held = sum(tensor.nbytes for tensor in state_of(house.trainer))
    house.close()
    after = plain_copies(size, torch.device(device))
    pipe.send(Found(seconds=seconds, counts=counts, bytes=held, limits=(before, after), verified=verified))


def live_with_a_twin(pipe: Connection, model: str, device: str, cycles: int, engine: str) -> None:
    """Answers whether steps between hand-overs are those of a trainer that never sleeps, metrics and all tensors."""
    if device == "cuda":
        # Else the backward pass of attention adds up in any order, and no run equals another to the last bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        torch.set_num_threads(1)
    house = House(Path(model), device, engine)
    twin = make_trainer(Path(model), Place(device=device))
    twin.gate.open(Part.ALL)
    twin.begin("rl")
    equal = all(house.cycle(number) == step(twin, number) for number in range(cycles))
    with house.residency.awake(house.trainer):
        equal = equal and fingerprint(state_of(house.trainer)) == fingerprint(state_of(twin))
    house.close()
    twin.close()
    pipe.send(equal)
