"""One rank's pieces as one file: written where they lie in memory, in the driver's process or in a worker's."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tidemill.checkpoint.placing import first_difference, place_pieces
from tidemill.checkpoint.safetensors_file import slots_of, write_tensors
from tidemill.checkpoint.safetensors_header import Slot, pack_header
from tidemill.contracts.checkpoint import HeldTensor, Places, Shard, TensorSpec, WrittenFile

__all__ = ["FileLayout", "LocalShard", "layout_of", "write_shard"]


@dataclass(frozen=True, eq=False)
class FileLayout:
    """Where in a file each tensor lies, and what the file begins with, byte for byte."""

    slots: tuple[Slot, ...]
    header: bytes

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + (self.slots[-1].end if self.slots else 0)


def layout_of(tensors: Mapping[str, HeldTensor]) -> FileLayout:
    """Depends on names, dtypes and shapes alone. Raises CheckpointError when bytes, dtype and shape do not agree."""
    slots = slots_of(tensors)
    return FileLayout(slots, pack_header(slots, {}))


def _nobody(name: str) -> None:
    """Nobody wants to know."""


def write_shard(
    path: Path,
    tensors: Mapping[str, HeldTensor],
    advance: Callable[[int], None],
    faults: str = "checkpoint",
    written: Callable[[str], None] = _nobody,
    layout: FileLayout | None = None,
) -> WrittenFile:
    """Create and fsync the safetensors file `path` of pieces in their own shapes.

    The layout depends on names, dtypes and shapes alone, so that whoever knows those knows it too; who has it gives it.
    `advance` is told of bytes written and may raise to stop; `written` of each piece that is read no more; `faults` is
    the prefix of the fault points passed. Raises CheckpointError when bytes, dtype and shape of a piece do not agree,
    and OSError; what is at `path` then is the caller's to remove.
    """
    layout = layout or layout_of(tensors)
    return write_tensors(
        path,
        layout.slots,
        lambda name: tensors[name].pieces(),
        header=layout.header,
        faults=faults,
        advance=advance,
        written=written,
    )


class LocalShard:
    """Pieces in the memory of this process: a Shard. `written` is told of each that is not read again: see Snapshot."""

    def __init__(
        self,
        tensors: Mapping[str, HeldTensor],
        written: Callable[[str], None] = _nobody,
        layout: FileLayout | None = None,
    ) -> None:
        """`layout` is that of their file, where it is known from an equal one."""
        self._tensors = tensors
        self._written = written
        self._known = layout

    @cached_property
    def layout(self) -> FileLayout:
        """Of its file. Raises CheckpointError when bytes, dtype and shape of a piece do not agree."""
        return self._known or layout_of(self._tensors)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See Shard. Raises CheckpointError when bytes, dtype and shape of a piece do not agree."""
        _ = self.layout
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """See Shard."""
        gone = frozenset(last)
        written = self._written

        def tell(name: str) -> None:
            if name in gone:
                written(name)

        told = written if gone.issuperset(self._tensors) else tell
        return write_shard(path, self._tensors, advance, written=told, layout=self.layout)

    def some(self, names: Collection[str]) -> Shard:
        """See Shard."""
        return LocalShard({name: tensor for name, tensor in self._tensors.items() if name in names})

    def place(self, places: Places, advance: Callable[[int], None], *, last: bool = False) -> int:
        """See Placer."""
        written = self._written if last else _nobody
        for name in self._tensors.keys() - places.keys():
            written(name)
        return place_pieces(self._pieces(), places, advance, written=written)

    def differing(self, places: Places, advance: Callable[[int], None]) -> str:
        """See Placer."""
        return first_difference(self._pieces(), places, advance)

    def _pieces(self) -> Mapping[str, tuple[TensorSpec, HeldTensor]]:
        return {name: (tensor.spec, tensor) for name, tensor in self._tensors.items()}
