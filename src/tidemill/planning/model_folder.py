"""What a model folder says of its parameters, without a tensor library: config.json and the headers of safetensors."""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import DataError
from tidemill.planning.decoder import ARCHITECTURES, Decoder, Shape, buffer_shapes, decoder_of, parameter_shapes

__all__ = ["Model", "read_model"]

_HEAD = "lm_head.weight"
_LAYERS = ".layers."
# What old files hold and models compute by themselves.
_COMPUTED = "rotary_emb.inv_freq"
_MOST_ROWS, _MOST_DIMENSIONS = 10**12, 8


@dataclass(frozen=True, kw_only=True)
class Model:
    """Parameters by name, tied ones once, and buffers, which are float32. `source` says where the shapes are from."""

    folder: Path
    decoder: Decoder
    shapes: Mapping[str, Shape]
    buffers: tuple[Shape, ...]
    source: str

    @property
    def parameters(self) -> int:
        """How many numbers."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(math.prod(shape) for shape in self.shapes.values())

    def layers(self) -> list[int]:
        """Elements of each decoder layer."""
        found: dict[str, int] = {}
        for name, shape in self.shapes.items():
            before, inside, after = name.partition(_LAYERS)
            if inside:
                layer = before + after.partition(".")[0]
                found[layer] = found.get(layer, 0) + math.prod(shape)
        return list(found.values()) or [0]


def read_model(folder: Path) -> Model:
    """Raises DataError when the folder is none of a model, or tells too little of one."""
    config = _config(folder)
    decoder = decoder_of(config)
    stored = _stored(folder)
    if decoder.tied or _HEAD not in stored:
        stored.pop(_HEAD, None)
    shapes, source = stored, "headers of the safetensors files"
    if decoder.architecture in ARCHITECTURES:
        described = parameter_shapes(config)
        # Files may cut what the model joins, such as the experts of a layer: the model's own shapes are what counts.
        if not stored or _elements(stored) == _elements(described):
            shapes, source = described, "config.json, and the files agree" if stored else "config.json"
    elif not stored:
        parameter_shapes(config)
    return Model(folder=folder, decoder=decoder, shapes=shapes, buffers=buffer_shapes(config), source=source)


def _elements(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if path.exists() and not path.is_file():
        raise DataError(f"cannot plan for {folder}: its config.json is not a file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot plan for {folder}: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"cannot plan for {folder}: its config.json is not a JSON object")
    return config


def _stored(folder: Path) -> dict[str, Shape]:
    """Shapes in the folder's files; none when there are no files, or not all of them."""
    files = list(_files(folder))
    if not files or not all(file.is_file() for file in files):
        return {}
    found = {name: shape for file in files for name, shape in _header(file) if not name.endswith(_COMPUTED)}
    return dict(sorted(found.items()))


def _files(folder: Path) -> Iterator[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        yield single
    elif index.is_file():
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            yield from (folder / name for name in sorted(set(listed.values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot plan for {folder}: {index.name} cannot be read: {error!r}") from error


def _header(file: Path) -> Iterator[tuple[str, Shape]]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError(f"it announces a header of {size} bytes")
            fields = json.loads(opened.read(size))
        for name, field in fields.items():
            if name != "__metadata__":
                yield name, _shape(field["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot plan for {file.parent}: {file.name} is damaged: {error!r}") from error


def _shape(counts: list[object]) -> Shape:
    """Raises ValueError for what is no shape of any tensor."""
    shape = tuple(count for count in counts if isinstance(count, int) and 0 <= count <= _MOST_ROWS)
    if not len(shape) == len(counts) <= _MOST_DIMENSIONS:
        raise ValueError(f"it holds a tensor of shape {reprlib.repr(counts)}")
    return shape
