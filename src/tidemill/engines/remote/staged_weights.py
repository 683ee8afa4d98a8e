"""One whole set of weights in a safetensors file, where servers can read it: written in place, version after version.

The folder holds the model's small files too, so that a server takes it for a model folder. Its layout is known before
the first weight comes: weights are cast straight into the mapped file, from wherever they are, and no copy is made.
"""

import ctypes
import json
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from tidemill.contracts.weights import Sample
from tidemill.engines.common.arrivals import Arrivals
from tidemill.errors import WeightSyncError
from tidemill.units import format_bytes
from tidemill.weights.checksum import checksums, sampled_checksums
from tidemill.weights.copying import copy_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StagedWeights", "make_folder"]

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "tidemill-weights-"
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 256
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_LARGEST_SMALL = 64 << 20


def make_folder(wanted: Path | None) -> Path:
    """A new folder under `wanted`, or in shared memory, of which a process that is gone leaves nothing behind."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
    root = wanted or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    for left in root.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))


class StagedWeights:
    """Weights of `shapes`, in `dtype`, in `folder`, which is this object's own; they come from `device`.

    `aliases` are names of tied weights under which some servers want them too, with the name that they come by.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        aliases: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self.folder = folder
        self._device = device
        self._model = model
        self._shapes, self._dtype, self._aliases = dict(shapes), dtype, dict(aliases)
        self._arrivals = Arrivals(self._shapes)
        self._views: dict[str, Tensor] = {}
        # Also when nobody closes this, at the latest when the process ends: shared memory outlives it.
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, aliases not counted."""
        return sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that the file takes now."""
        file = self.folder / "model.safetensors"
        return file.stat().st_size if file.exists() else 0

    def begin(self) -> None:
        """Wait for every weight from now on, whatever came before. Raises WeightSyncError when there is no room."""
        self._arrivals.begin()
        if not self._views:
            try:
                self._create()
            except OSError as error:
                (self.folder / "model.safetensors").unlink(missing_ok=True)
                raise WeightSyncError(
                    f"cannot stage {format_bytes(self.nbytes)} of weights for the servers in {self.folder}: "
                    f"{error.strerror}; make room, or set engine.weights_folder to a folder that they can read"
                ) from error

    def load(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Write weights, casting. Raises WeightSyncError at the first that does not fit, or that has come already."""
        for name, tensor in tensors:
            self._arrivals.check(name)
            if tuple(tensor.shape) != self._shapes[name]:
                raise WeightSyncError(
                    f"cannot load {name} into the engine: it came as {tuple(tensor.shape)} and should be "
                    f"{self._shapes[name]}; trainer and engine must be built from the same model folder"
                )
            copy_weight(self._views[name], tensor)
            for alias in (alias for alias, source in self._aliases.items() if source == name):
                copy_weight(self._views[alias], self._views[name])
            self._arrivals.add(name)

    def missing(self) -> tuple[str, ...]:
        """Names of the weights that have not come since `begin`."""
        return self._arrivals.missing()

    def views(self) -> "Mapping[str, Tensor]":
        """Every weight as it lies in the file. What is written there later shows here. None before `begin`."""
        return {name: self._views[name] for name in self._shapes if name in self._views}

    def checksums(self, sample: Sample) -> Mapping[str, int]:
        """Of every weight in `sample` as it lies in the file. Sums of words are taken on the GPU where there is one.

        A CPU computes those at a tenth of the rate at which the bus brings the weights there.
        """
        if not (sample.words and self._device.type == "cuda"):
            return sampled_checksums(self.views(), sample)
        chosen = sample.chosen(self._shapes)
        return checksums((name, tensor.to(self._device)) for name, tensor in self.views().items() if name in chosen)

    def flush(self) -> None:
        """Return when another host would see what was written, as far as its file system promises that."""
        if self._views:
            self._mapped.flush()

    def close(self) -> None:
        """Remove the folder. Servers that read it just now keep what they opened."""
        self._views = {}
        self._remove()

    def _create(self) -> None:
        for small in (small for pattern in _SMALL_FILES for small in self._model.glob(pattern)):
            if small.name != "model.safetensors.index.json" and small.stat().st_size <= _LARGEST_SMALL:
                shutil.copyfile(small, self.folder / small.name)
        header, start, places = self._layout()
        size = start + sum(end - begin for begin, end in places.values())
        with (self.folder / "model.safetensors").open("w+b") as file:
            # Reserved, not only named: a write to a mapped page that there is no room for would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            file.flush()
            self._mapped = mmap.mmap(file.fileno(), size)
        # A tensor over the mapping itself: a weight is cast from its device into the page that servers read.
        whole = torch.frombuffer((ctypes.c_char * size).from_buffer(self._mapped), dtype=torch.uint8)
        shapes = self._all_shapes()
        self._views = {
            name: whole[start + begin : start + end].view(self._dtype).view(shapes[name])
            for name, (begin, end) in places.items()
        }

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes | {alias: self._shapes[source] for alias, source in self._aliases.items()}

    def _layout(self) -> tuple[bytes, int, dict[str, tuple[int, int]]]:
        """Header, the start of the data, and where each weight lies from there on: one behind the other."""
        places: dict[str, tuple[int, int]] = {}
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in self._all_shapes().items():
            places[name] = (end, end + math.prod(shape) * self._dtype.itemsize)
            end = places[name][1]
            table[name] = {"dtype": _CODES[self._dtype], "shape": list(shape), "data_offsets": list(places[name])}
        text = json.dumps(table).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text, len(text) + 8, places
