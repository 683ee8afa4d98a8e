"""One rank's pieces as one file: written where they lie in memory, in the driver's process or in a worker's."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tidemill.checkpoint.placing import first_difference, place_pieces
from tidemill.checkpoint.safetensors_file import slots_of, write_tensors
from tidemill.contracts.checkpoint import HeldTensor, Shard, TensorPlace, TensorSpec, WrittenFile

__all__ = ["LocalShard", "write_shard"]


def _nobody(name: str) -> None:
    """Nobody wants to know."""


def write_shard(
    path: Path,
    tensors: Mapping[str, HeldTensor],
    advance: Callable[[int], None],
    faults: str = "checkpoint",
    written: Callable[[str], None] = _nobody,
) -> WrittenFile:
    """Create and fsync the safetensors file `path` of pieces in their own shapes.

    The layout depends on names, dtypes and shapes alone, so that whoever knows those knows it too. `advance` is told
    of bytes written and may raise to stop; `written` of each piece that is read no more; `faults` is the prefix of the
    fault points passed. Raises CheckpointError when bytes, dtype and shape of a piece do not agree, and OSError; what
    is at `path` then is the caller's to remove.
    """
    return write_tensors(
        path,
        slots_of(tensors),
        lambda name: tensors[name].pieces(),
        metadata={},
        faults=faults,
        advance=advance,
        written=written,
    )


class LocalShard:
    """Pieces in the memory of this process: a Shard. `written` is told of each that is not read again: see Snapshot."""

    def __init__(self, tensors: Mapping[str, HeldTensor], written: Callable[[str], None] = _nobody) -> None:
        self._tensors = tensors
        self._written = written

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See Shard. Raises CheckpointError when bytes, dtype and shape of a piece do not agree."""
        slots_of(self._tensors)
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """See Shard."""
        gone = frozenset(last)
        written = self._written

        def tell(name: str) -> None:
            if name in gone:
                written(name)

        return write_shard(path, self._tensors, advance, written=tell)

    def some(self, names: Collection[str]) -> Shard:
        """See Shard."""
        return LocalShard({name: tensor for name, tensor in self._tensors.items() if name in names})

    def place(self, places: Mapping[str, TensorPlace], advance: Callable[[int], None], *, last: bool = False) -> int:
        """See Placer."""
        written = self._written if last else _nobody
        for name in self._tensors.keys() - places.keys():
            written(name)
        return place_pieces(self._pieces(), places, advance, written=written)

    def differing(self, places: Mapping[str, TensorPlace], advance: Callable[[int], None]) -> str:
        """See Placer."""
        return first_difference(self._pieces(), places, advance)

    def _pieces(self) -> Mapping[str, tuple[TensorSpec, HeldTensor]]:
        return {name: (tensor.spec, tensor) for name, tensor in self._tensors.items()}
