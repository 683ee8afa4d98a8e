"""What the trainers' suite tests with: batches, leases without a manager, and states that can be compared."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.stored_tensor import FilePiece, StoredTensor
from tidemill.contracts.batch import Batch
from tidemill.contracts.checkpoint import Saved, SavedTensor, Shard, Snapshot, TensorBytes, TensorSpec
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import Trainer

__all__ = ["MakeTrainer", "awake", "copied", "plain", "ragged_batch", "same"]

MakeTrainer = Callable[[], Trainer]


def ragged_batch(*, seed: int = 0, rows: int = 6, words: int = 32, longest: int = 12) -> Batch:
    """Random rows of 3 to `longest` tokens; a third of each is the prompt; answers have advantages of either sign."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, longest + 1, rows)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    mask = np.concatenate([np.arange(length) >= max(1, length // 3) for length in lengths])
    advantages = np.repeat(draw.standard_normal(rows), lengths)
    return Batch(
        token_ids=draw.integers(0, words, offsets[-1]),
        offsets=offsets,
        loss_mask=mask,
        logprobs=np.where(mask, -draw.uniform(2.0, 4.0, offsets[-1]), 0.0).astype(np.float32),
        advantages=np.where(mask, advantages, 0.0).astype(np.float32),
        metrics={},
    )


@contextmanager
def awake(trainer: Trainer) -> Iterator[None]:
    """What a lease does, without a manager: wake, open the gate, and close it behind."""
    trainer.wake_up(Part.ALL)
    trainer.gate.open(Part.ALL)
    try:
        yield
    finally:
        trainer.gate.close(Part.ALL)


def copied(snapshot: Snapshot) -> Saved:
    """The snapshot's contents as bytes of their own, as if read from files; shards are written to some, and joined."""
    tensors = {
        name: TensorBytes(dtype=tensor.dtype, shape=tensor.shape, data=memoryview(bytes(tensor.data)))
        for name, tensor in snapshot.tensors.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        tensors |= _joined(snapshot.shards, Path(folder))
    return Saved(tensors=tensors, extra=dict(snapshot.extra))


def _joined(shards: Sequence[Shard], folder: Path) -> dict[str, TensorBytes]:
    pieces: dict[str, list[FilePiece]] = {}
    specs: dict[str, TensorSpec] = {}
    for number, shard in enumerate(shards):
        path = folder / f"{number}.safetensors"
        shard.write(path, lambda count: None)
        header = TensorFile(path).header
        for slot in header.slots:
            begin, end = header.data_start + slot.begin, header.data_start + slot.end
            specs[slot.name] = spec = shard.specs[slot.name]
            pieces.setdefault(slot.name, []).append(
                FilePiece(path=path, begin=begin, end=end, offset=spec.offset, shape=spec.shape)
            )
    joined = {
        name: StoredTensor(dtype=specs[name].dtype, shape=specs[name].whole, pieces=tuple(pieces[name]))
        for name in specs
    }
    return {
        name: TensorBytes(dtype=tensor.dtype, shape=tensor.shape, data=memoryview(bytes(tensor.data)))
        for name, tensor in joined.items()
    }


def same(one: Saved, other: Saved) -> bool:
    """Whether two states are equal in every name, shape, bit and count."""
    return one.extra == other.extra and plain(one.tensors) == plain(other.tensors)


def plain(tensors: Mapping[str, SavedTensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What can be compared of each tensor."""
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()}
