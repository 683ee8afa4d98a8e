"""What can be saved, and the one who saves it."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tidemill.contracts.landing import NOWHERE, Landing
from tidemill.contracts.state import RunState

__all__ = [
    "Checkpointer",
    "HeldTensor",
    "Placer",
    "Places",
    "Saved",
    "SavedTensor",
    "Shard",
    "Snapshot",
    "Stateful",
    "TensorBytes",
    "TensorPlace",
    "TensorSpec",
    "WrittenFile",
    "read_box",
    "stretches",
]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor, or a rank's piece of one: `shape` at `offset` in one of shape `whole`; `dtype` is safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]


class SavedTensor(Protocol):
    """A whole tensor, in however many pieces it lies. Can be sent to another process of the same file system."""

    @property
    def dtype(self) -> str:
        """Safetensors' name (F32, BF16, I64, U8, ...)."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        ...

    @property
    def data(self) -> memoryview:
        """All of it, row-major; a copy when it lies in pieces."""
        ...

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """The box of `shape` at `offset`, row-major, flat; no copy when it lies in one stretch of one piece."""
        ...


class HeldTensor(SavedTensor, Protocol):
    """A tensor, or a rank's piece of one, in the memory of this process."""

    @property
    def spec(self) -> TensorSpec:
        """What it is a piece of."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its elements. Copies nothing."""
        ...

    def pieces(self) -> Iterable[memoryview]:
        """Its bytes, row-major, as flat views one behind the other; no copy of a tensor that lies row-major.

        Raises CheckpointError when whoever held it for the reader was told that it is read no more.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorBytes:
    """One tensor, or a rank's piece of one, as bytes in host memory. `dtype` is safetensors' name; row-major.

    `whole` and `offset` say which piece it is; without them it is all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None

    @property
    def spec(self) -> TensorSpec:
        """What it is a piece of."""
        whole = self.shape if self.whole is None else self.whole
        offset = (0,) * len(self.shape) if self.offset is None else self.offset
        return TensorSpec(dtype=self.dtype, shape=self.shape, whole=whole, offset=offset)

    @property
    def nbytes(self) -> int:
        """See HeldTensor."""
        return self.data.nbytes

    def pieces(self) -> tuple[memoryview]:
        """See HeldTensor."""
        return (self.data,)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """See SavedTensor."""
        return read_box(self.data, self.shape, offset, shape)

    def __reduce__(self) -> tuple[Any, ...]:
        # A memoryview cannot be sent to another process; its bytes can.
        return _tensor_bytes, (self.dtype, self.shape, bytes(self.data), self.whole, self.offset)


def _tensor_bytes(dtype: str, shape: tuple[int, ...], data: bytes, *piece: tuple[int, ...] | None) -> TensorBytes:
    return TensorBytes(dtype=dtype, shape=shape, data=memoryview(data), whole=piece[0], offset=piece[1])


def read_box(data: memoryview, held: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
    """The box of `shape` at `offset` in a row-major tensor of shape `held`, flat; a view where it is one stretch."""
    if math.prod(shape) == 0:
        return memoryview(b"")
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    starts, stretch = stretches(held, offset, shape, item=len(flat) // math.prod(held))
    if len(starts) == 1:
        return flat[starts[0] : starts[0] + stretch]
    return memoryview(b"".join(flat[start : start + stretch] for start in starts))


def stretches(
    held: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], *, item: int
) -> tuple[list[int], int]:
    """Where a box that is not empty lies in a row-major tensor of shape `held`: first bytes, and how many each time.

    `item` is the bytes of an element.
    """
    # Trailing dimensions taken whole make one stretch with the dimension before them.
    inner = len(shape)
    while inner > 0 and shape[inner - 1] == held[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    stretch = math.prod(shape[outer:]) * item
    starts = [sum(o * math.prod(held[d + 1 :]) for d, o in enumerate(offset)) * item]
    for dimension in range(outer):
        step = math.prod(held[dimension + 1 :]) * item
        starts = [start + index * step for start in starts for index in range(shape[dimension])]
    return starts, stretch


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that is durable. `blocks` are the xxh3 of each 16 MiB of it, header included; the last block is shorter.

    `direct` says whether it was written past the page cache, as fast as the disk.
    """

    blocks: tuple[str, ...]
    direct: bool


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Where a box of a tensor lies in a file: row-major from byte `begin`, its elements cast to `dtype`.

    The box has `shape` and begins at `start` in the whole, at the beginning without one. What is in no box of a tensor
    has no place.
    """

    path: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()


Places = Mapping[str, Sequence[TensorPlace]]
"""By a tensor's name where its boxes lie: one that is all of it, or as many as it is cut into."""


class Placer(Protocol):
    """Pieces of tensors that can be written into the middle of files which others write into, too."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Each piece by the name of its tensor."""
        ...

    def place(self, places: Places, advance: Callable[[int], None], *, last: bool = False) -> int:
        """Write its pieces of the tensors in `places` into files that are there, durably; how many bytes those are.

        Nothing else of the files is touched. `last`: nothing of it is read any more, not even when this fails, and each
        piece may be let go of as it is written. `advance` is as for `Shard.write`; raises what that raises.
        """
        ...

    def differing(self, places: Places, advance: Callable[[int], None]) -> str:
        """The first tensor of which the files hold something else than `place` would write; "" when there is none."""
        ...


class Shard(Placer, Protocol):
    """One rank's pieces of a snapshot, which lie in the memory of another process: that process writes them."""

    def some(self, names: Collection[str]) -> "Shard":
        """Its pieces of the tensors in `names` alone, as a shard; they cannot be let go of through it."""
        ...

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """Create the safetensors file `path`, durably. Any thread may call it.

        `advance` is told of bytes written, and of none now and then, and may raise to stop: then nothing writes to
        `path` any more when that goes on. `last` names tensors that are read no more, not even when this fails: each
        may be let go of as it is written. Raises OSError as writing here would, and WorkerError.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """State of one part at one moment, in host memory, that nothing changes until `release` is called.

    `tensors` go into a safetensors file, `extra` (JSON values) into state.json. A part of several ranks has `shards`
    instead of tensors, one for each rank that has something to write; its `extra` says `ranks`, and in how many
    `replicas` of the whole they are, so that a change is told. `release` may be called from any thread, more than once.

    Whoever reads `tensors` for the last time may say so of each by name, to `written`: what holds it is then free for
    others before the rest is. From then on reading it again is refused, for another try at the same file too.
    """

    tensors: Mapping[str, HeldTensor] = field(default_factory=dict)
    shards: Sequence[Shard] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    written: Callable[[str], None] = lambda name: None
    release: Callable[[], None] = lambda: None
    layout: Hashable = None
    """Snapshots of one part whose layouts are equal, and not None, have equal pieces in equally many shards."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """What a `Snapshot` held, read back and verified; `landing` is where tensors have landed already.

    `accept` names changes that whoever loads it is asked to put up with, as `checkpoint.accept` has them.
    """

    tensors: Mapping[str, SavedTensor]
    extra: Mapping[str, Any]
    accept: Collection[str] = ()
    landing: Landing = NOWHERE


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
