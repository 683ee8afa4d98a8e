"""What happens in a run, as values that recorders receive."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemill.contracts.batch import Batch
from tidemill.contracts.sample import Group, Trajectory

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

__all__ = [
    "CheckpointEvent",
    "Emit",
    "Evaluated",
    "Event",
    "Learned",
    "Memory",
    "Metrics",
    "Notice",
    "PhaseDone",
    "Progress",
    "RolloutDone",
    "TokenApart",
    "TokensApart",
    "Transition",
    "WeightsCompared",
    "ignore",
    "phase",
]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Numbers of a step by name (`reward/mean`, `policy/loss`, `mismatch/...`): what a resume reproduces."""

    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PhaseDone:
    """A stretch of work ended. `name` as in `time/<name>`; `start` is Unix time; `owner` is who did it."""

    name: str
    start: float
    seconds: float
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightsCompared:
    """After a hand-over `compared` of the `total` weights of `owner` were found, by checksum, to be the trainer's."""

    owner: str
    compared: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Who holds which bytes, at Unix time `time`, after `what` happened."""

    time: float
    what: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    budget: int


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A tenant slept or woke, from Unix time `start`; `what` as in `trainer.sleep`.

    `copied` bytes crossed between device and host within its seconds, at `gbps` (1e9 bytes a second of the whole
    transition); `beside` bytes crossed for it beside other work: begun before a sleep, or still on their way behind a
    wake. `waited` seconds of it were for readers of the host copy. `left` are device bytes behind it that are no
    tenant's, by holder.
    """

    what: str
    owner: str
    start: float
    seconds: float
    copied: int = 0
    beside: int = 0
    waited: float = 0.0
    left: Mapping[str, int] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        """Rate of the whole transition, allocating and freeing included; 0 when nothing crossed within it."""
        return self.copied / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint became `staged` (in host memory), `durable`, `pruned` or `failed`, at Unix time `time`.

    `restored` is said of one that a start goes on from: it is durable, even when its writer died before it said so.
    """

    time: float
    status: str
    step: int
    path: str
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutDone:
    """Scored groups of a step, to read, count and dump. `kind` is `train` or `eval`."""

    kind: str
    groups: Sequence[Group]


@dataclass(frozen=True, kw_only=True)
class Learned:
    """An update was made from these groups; `batch` holds their trajectories as rows, in order.

    `logprobs` are the trainer's, as a StepReport has them.
    """

    groups: Sequence[Group]
    batch: Batch
    logprobs: "Float32[np.ndarray, ' N']"

    def advantages(self) -> dict[str, float]:
        """Advantage of each trajectory that was trained on, by id."""
        found: dict[str, float] = {}
        for trajectory, span in self._spans():
            trained = self.batch.advantages[span][self.batch.loss_mask[span]]
            if len(trained):
                found[trajectory.id] = float(trained[0])
        return found

    def trainer_logprobs(self) -> dict[str, list[float]]:
        """The trainer's log-prob of each token of each trajectory that was trained on, by id; 0 where it was not."""
        return {
            trajectory.id: self.logprobs[span][len(trajectory.prompt.token_ids) :].tolist()
            for trajectory, span in self._spans()
            if self.batch.loss_mask[span].any()
        }

    def _spans(self) -> Iterator[tuple[Trajectory, slice]]:
        trajectories = (trajectory for group in self.groups for trajectory in group.trajectories)
        for row, trajectory in enumerate(trajectories):
            yield trajectory, slice(self.batch.offsets[row], self.batch.offsets[row + 1])


@dataclass(frozen=True, kw_only=True)
class TokenApart:
    """A sampled token and its log-probs in nats, by the engine and by the trainer.

    `trajectory` is the answer's id and `position` the token's place in it, from 0; `version` is the step of the weights
    that sampled it; `text` and `before` are the token and some before it, for people.
    """

    trajectory: str
    version: int
    position: int
    token_id: int
    text: str
    before: str
    engine: float
    trainer: float


@dataclass(frozen=True, kw_only=True)
class TokensApart:
    """The tokens of a step on which engine and trainer differ most, most first."""

    tokens: Sequence[TokenApart]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result of an evaluation of the present weights: `eval/exact_match` and so on."""

    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `total` units of `what`; `total` 0 when unknown. For a progress bar; never stored."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something a person should read. `level` is `info` or `warning`."""

    text: str
    level: str = "info"
    details: Mapping[str, Any] = field(default_factory=dict)


Event = (
    Metrics
    | PhaseDone
    | Memory
    | Transition
    | WeightsCompared
    | CheckpointEvent
    | RolloutDone
    | Learned
    | TokensApart
    | Evaluated
    | Progress
    | Notice
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An `Emit` for those whom nobody listens to."""


@contextlib.contextmanager
def phase(emit: Emit, name: str, owner: str = "") -> Iterator[None]:
    """Emit a `PhaseDone` when the block ends, by an exception too."""
    start, began = time.time(), time.perf_counter()
    try:
        yield
    finally:
        emit(PhaseDone(name=name, start=start, seconds=time.perf_counter() - began, owner=owner))
