"""A model folder's weights, read from its safetensors files row by row, straight to where they are wanted.

Whoever wants some rows of a tensor reads these alone: the files are mapped, and no copy of the whole is made.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill.errors import DataError

__all__ = ["COMPUTED", "StoredWeights", "Wanted", "WeightReader", "fill", "open_weights"]

_DTYPES = {"F64", "F32", "F16", "BF16"}
COMPUTED = "rotary_emb.inv_freq"
"""How the names end of buffers that old files hold, and that models have long computed by themselves."""


class WeightReader(Protocol):
    """Tensors by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the first dimension, on the CPU, in the dtype of the file."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """Rows of a tensor of shape `whole`, from row `start` on, to be cast and copied into `tensor`.

    `names` are those that it may be stored under: a tied tensor has several. Without rows it is wanted by another rank.
    """

    names: tuple[str, ...]
    whole: tuple[int, ...]
    start: int
    tensor: Tensor


class StoredWeights:
    """Open safetensors files; implements `WeightReader`."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See WeightReader."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See WeightReader. Raises DataError for numbers that are not floating-point: quantized weights, say."""
        part = self._slices[name]
        if part.get_dtype() not in _DTYPES:
            raise DataError(
                f"cannot load {name}: it is stored as {part.get_dtype()}, and weights must be floating-point numbers; "
                "convert the model to bfloat16 first"
            )
        found: Tensor = part[start:stop]
        return found


@contextmanager
def open_weights(folder: Path) -> Iterator[StoredWeights]:
    """The folder's weights, within the block. Raises DataError when there are none, or a file is damaged."""
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in _files(folder)]
            yield StoredWeights(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"cannot load a model from {folder}: {error}; `model` must name a folder with config.json and safetensors"
        ) from error


def _files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(listed.values()))]


@torch.no_grad()
def fill(folder: Path, reader: WeightReader, wanted: Sequence[Wanted]) -> None:
    """Read everything that is wanted. Raises DataError, before anything is read, unless names and shapes fit both ways.

    `folder` is for messages.
    """
    shapes = reader.shapes()
    sources = [next((name for name in item.names if name in shapes), "") for item in wanted]
    _check(folder, shapes, wanted, sources)
    for item, source in zip(wanted, sources, strict=True):
        if item.tensor.numel():
            item.tensor.copy_(reader.rows(source, item.start, item.start + len(item.tensor)))


def _check(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], wanted: Sequence[Wanted], sources: Sequence[str]
) -> None:
    known = {name for item in wanted for name in item.names}
    pairs = list(zip(wanted, sources, strict=True))
    wrong = {
        "missing": [item.names[0] for item, source in pairs if not source],
        "unexpected": [name for name in shapes if name not in known and not name.endswith(COMPUTED)],
        "mismatched": [source for item, source in pairs if source and shapes[source] != item.whole],
    }
    found = [f"{len(names)} {how} ({min(names)} ...)" for how, names in wrong.items() if names]
    if found:
        raise DataError(
            f"cannot train the model in {folder}: its weights do not fit its config.json: {', '.join(found)}; "
            "download or convert it again"
        )
