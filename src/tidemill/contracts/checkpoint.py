"""What can be saved, and the one who saves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidemill.contracts.state import RunState

__all__ = ["Checkpointer", "Saved", "Snapshot", "Stateful", "TensorBytes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorBytes:
    """One tensor as bytes in host memory. `dtype` is safetensors' name (F32, BF16, I64, U8, ...); row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """State of one part at one moment, in host memory, that nothing changes until `release` is called.

    `tensors` go into a safetensors file, `extra` (JSON values) into state.json. `release` may be called from any
    thread, more than once.
    """

    tensors: Mapping[str, TensorBytes] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """What a `Snapshot` held, read back and verified."""

    tensors: Mapping[str, TensorBytes]
    extra: Mapping[str, Any]


class Stateful(Protocol):
    """A part whose state determines the future: its `name` names its file in a checkpoint."""

    @property
    def name(self) -> str:
        """Letters, digits and `_`."""
        ...

    def snapshot(self) -> Snapshot:
        """The present state. Cheap for what sleeps: the host copy that sleep made is the snapshot."""
        ...

    def load(self, saved: Saved) -> None:
        """Take on a saved state. Strict on names and shapes: raises CheckpointError, and then changes nothing."""
        ...


class Checkpointer(Protocol):
    """Built over every stateful part. An acknowledged checkpoint is never lost, an unacknowledged one never loaded."""

    def restore(self) -> RunState | None:
        """Load the newest complete and verified checkpoint; None when there is none at all."""
        ...

    def save_if_due(self, state: RunState) -> None:
        """Mark the present state for saving when the schedule says so; called inside the trainer's lease.

        Writing goes on in the background. Raises CheckpointError when an earlier background save failed and the
        settings say stop.
        """
        ...

    def save(self, state: RunState) -> None:
        """Save this state unless it is saved already, awake or asleep, taking its own lease if one is needed."""
        ...

    def drain(self) -> None:
        """Wait until every save begun is durable. Raises CheckpointError when one failed."""
        ...
