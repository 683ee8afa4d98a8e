"""The real trainer and the real engine of one process under real leases, in the smallest budget for both."""

import itertools
from pathlib import Path
from typing import Any

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit, Event, Memory
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.trainer import ragged_batch
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.weights.direct import DirectWeightSync

__all__ = ["LOSS", "RL", "Pair", "requests"]

LOSS = ClipLoss(low=0.2, high=0.2)
RL = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=1000,
)


def requests(count: int) -> list[Request]:
    return [Request(key=f"0:{row}#0", token_ids=(5 + row, 9, 20)) for row in range(count)]


class Pair:
    """`kind` is the engine's class; `room` are bytes beyond what must be awake at once."""

    def __init__(
        self,
        folder: Path,
        *,
        kind: type[TransformersEngine] = TransformersEngine,
        hear: Emit = lambda event: None,
        deadline: float = 5.0,
        kv_tokens: int = 512,
    ) -> None:
        self.events: list[Event] = []
        self.trainer = FsdpTrainer(
            model=folder,
            place=Place(),
            compute_dtype="float32",
            tokens_per_micro_batch=64,
            minibatches=1,
            recompute=False,
            max_grad_norm=1.0,
            phases={"rl": RL},
            page_bytes=1 << 13,
            emit=self.events.append,
        )
        self.engine = kind(model=folder, device="cpu", dtype="float32", max_batch=4, kv_tokens=kv_tokens, emit=hear)
        trainer, engine = self.trainer.footprint(Part.ALL), self.engine.footprint(Part.ALL)
        self.budget = max(trainer + self.engine.footprint(Part.WEIGHTS), engine)
        assert self.budget < trainer + engine, "there would be room for both"
        self.residency = LeaseManager(budget=self.budget, emit=self.events.append, deadline=deadline)
        self.residency.admit(self.trainer)
        self.sync = DirectWeightSync(residency=self.residency, emit=self.events.append)
        self._steps = itertools.count(1)

    def step(self, *, hand_over: bool = True) -> None:
        """One update, and the hand-over."""
        number = next(self._steps)
        with self.residency.awake(self.trainer):
            self.trainer.begin("rl")
            self.trainer.step(ragged_batch(seed=number), LOSS)
            if hand_over:
                self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, number))

    def generate(self, count: int = 3) -> list[Completion]:
        with self.residency.awake(self.engine):
            return self.engine.generate(requests(count), Sampling(max_new_tokens=2))

    def weights(self) -> dict[str, bytes]:
        """The trainer's, under its lease."""
        with self.residency.awake(self.trainer):
            return {name: tensor.clone().numpy().tobytes() for name, tensor in self.trainer.named_weights()}

    def sleep_trainer(self) -> None:
        """By asking for the whole engine."""
        with self.residency.awake(self.engine):
            assert self.held(self.trainer) == 0

    def held(self, tenant: Any) -> int:
        return int(tenant.footprint(tenant.resident()))

    def most_held(self) -> int:
        """Bytes on the device at the fullest moment between two transitions."""
        return max(sum(event.device.values()) for event in self.events if isinstance(event, Memory))
