"""Folders of weights in formats of pickles, as tensors by name: described first, located when they are asked for."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tidemill.checkpoint.foreign.guard import ask_for_archives, ask_for_metadata
from tidemill.checkpoint.foreign.tensors import Located, joined, located
from tidemill.contracts.checkpoint import SavedTensor
from tidemill.errors import CheckpointError, ConfigError

__all__ = ["Source", "open_bins", "open_dcp"]

_INDEX = "pytorch_model.bin.index.json"


class Source(Protocol):
    """What a folder holds."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor, by its name there."""
        ...

    def tensors(self, names: Collection[str]) -> Mapping[str, SavedTensor]:
        """Those of these names. Raises CheckpointError when one cannot be had whole."""
        ...


def open_dcp(folder: Path) -> Source:
    """What torch.distributed.checkpoint saved. Raises ConfigError when it is no such folder, CheckpointError."""
    metadata = folder / ".metadata"
    if not metadata.is_file():
        raise ConfigError(f"cannot convert {folder}: there is no .metadata in it; name the folder that holds it")
    return _DcpFolder(folder, ask_for_metadata(metadata)["tensors"])


def open_bins(folder: Path) -> Source:
    """The weights of pytorch_model*.bin. Raises ConfigError when there are none, CheckpointError."""
    paths = _bins(folder)
    if not paths:
        raise ConfigError(f"cannot convert {folder}: there is no pytorch_model*.bin in it; name the folder that has it")
    sizes = {path: _size(path) for path in paths}
    found: dict[str, Located] = {}
    answers = ask_for_archives([(path, 0, sizes[path]) for path in paths])
    for path, answer in zip(paths, answers, strict=True):
        for name, told in answer["tensors"].items():
            if name in found:
                raise CheckpointError(f"cannot read {folder}: {name} is in {found[name].path.name} and in {path.name}")
            found[name] = located(told, path, sizes[path])
    return _Bins(found)


@dataclass(frozen=True)
class _Bins:
    found: Mapping[str, Located]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: piece.shape for name, piece in self.found.items()}

    def tensors(self, names: Collection[str]) -> Mapping[str, SavedTensor]:
        return {name: joined(name, [self.found[name]], self.found[name].shape) for name in names}


@dataclass(frozen=True)
class _DcpFolder:
    folder: Path
    told: Mapping[str, Any]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.told.items()}

    def tensors(self, names: Collection[str]) -> Mapping[str, SavedTensor]:
        chunks = [(name, chunk) for name in names for chunk in self.told[name]["chunks"]]
        paths = {file: self._path(file) for file in {chunk["file"] for _, chunk in chunks}}
        sizes = {path: _size(path) for path in paths.values()}
        places = [(paths[chunk["file"]], chunk["begin"], chunk["length"]) for _, chunk in chunks]
        for path, begin, length in places:
            if begin + length > sizes[path]:
                raise CheckpointError(f"cannot read {path}: it has {sizes[path]} of {begin + length} bytes")
        pieces: dict[str, list[Located]] = {name: [] for name in names}
        for (name, chunk), (path, _, _), answer in zip(chunks, places, ask_for_archives(places), strict=True):
            piece = located(answer["tensors"].get("", {}), path, sizes[path], chunk["offset"])
            if piece.shape != tuple(chunk["shape"]) or piece.dtype != self.told[name]["dtype"]:
                raise CheckpointError(
                    f"cannot read {name}: {path.name} holds {piece.dtype} of shape {list(piece.shape)}, .metadata says "
                    f"{self.told[name]['dtype']} of shape {list(chunk['shape'])}"
                )
            pieces[name].append(piece)
        return {name: joined(name, held, self.shapes[name]) for name, held in pieces.items()}

    def _path(self, file: str) -> Path:
        path = self.folder / file
        if not file or Path(file).is_absolute() or ".." in Path(file).parts or not path.is_file():
            raise CheckpointError(f"cannot read {self.folder}: {file!r}, which .metadata names, is not there")
        return path


def _bins(folder: Path) -> list[Path]:
    """By the index where there is one, else all that have the name."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("pytorch_model*.bin"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [folder / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: it is no index of weights ({error})") from None
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"cannot convert {folder}: {', '.join(missing)}, which {_INDEX} names, is not there")
    return paths


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
