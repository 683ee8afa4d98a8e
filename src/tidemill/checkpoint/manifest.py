"""What a checkpoint says of itself: written last, so that its presence means that all the rest is there.

It names every file with its size and checksums, every slice of every tensor, and what the run was. It carries a
checksum over itself, because a flipped bit can leave JSON that still parses.

Format 1 has a checksum for each slice; since format 2 files of tensors have one for each 16 MiB of the file.
"""

import functools
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import tidemill
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.small_files import read_text_file
from tidemill.checkpoint.well_typed import check_entry, check_manifest, check_slice
from tidemill.contracts.checkpoint import TensorSpec
from tidemill.errors import CheckpointError

__all__ = [
    "FORMAT",
    "FORMAT_OF_BLOCKS",
    "MANIFEST",
    "STATE",
    "FileEntry",
    "Manifest",
    "NewerFormatError",
    "Slice",
    "Slices",
    "library_versions",
    "shard_file",
]

FORMAT = 2
FORMAT_OF_BLOCKS = 2  # the first whose files of tensors have checksums of their blocks
MANIFEST = "manifest.json"
STATE = "state.json"

_SHARD = re.compile(r".*-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")


def shard_file(part: str, index: int, count: int) -> str:
    """`trainer-00000-of-00002.safetensors`: the name of a part's file number `index` of `count`."""
    return f"{part}-{index:05d}-of-{count:05d}.safetensors"


class NewerFormatError(CheckpointError):
    """A later release wrote it: it is not broken, so nothing may walk past it."""


class Slice(NamedTuple):
    """A piece of a tensor: where it lies in the whole tensor, and where in its file (bytes from the file's start).

    `xxh3` is empty since format 2.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    begin: int
    end: int
    xxh3: str = ""


class Slices(tuple[Slice, ...]):
    """Those of one file. What is made of all of them is made once: files of many saves have the same."""

    @functools.cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What each is a piece of, by the name of its tensor."""
        return {
            piece.name: TensorSpec(
                dtype=piece.dtype, shape=piece.local_shape, whole=piece.global_shape, offset=piece.offset
            )
            for piece in self
        }

    @functools.cached_property
    def lines(self) -> str:
        """In the manifest, for people too: a line for each."""
        return ",\n    ".join(map(json.JSONEncoder().encode, self._plain))

    @functools.cached_property
    def canonical(self) -> str:
        """As the checksum of the manifest is over."""
        return _canonical(self._plain)

    @property
    def _plain(self) -> list[dict[str, Any]]:
        return [_without(piece._asdict(), "" if piece.xxh3 else "xxh3") for piece in self]

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> "Slices":
        """`slices` itself where it is one."""
        return slices if isinstance(slices, cls) else cls(slices)


@dataclass(frozen=True)
class FileEntry:
    """One file. `xxh3` covers it whole and is empty for files of tensors, which have `blocks`: see WrittenFile.

    In format 1 they have none, and their slices have checksums of their own.
    """

    name: str
    part: str
    bytes: int
    xxh3: str
    slices: tuple[Slice, ...]
    blocks: tuple[str, ...] = ()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What each slice is a piece of, by the name of its tensor."""
        return Slices.of(self.slices).specs


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one checkpoint. `parts` are the names of all that was saved; `time` is Unix time, for people."""

    step: int
    attempt: int
    parts: tuple[str, ...]
    files: tuple[FileEntry, ...]
    identity: Mapping[str, str]
    settings: Mapping[str, Any]
    retention: Mapping[str, Any]
    versions: Mapping[str, str]
    time: float
    release: str = tidemill.__version__
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry.bytes for entry in self.files)

    def shards(self, part: str) -> int:
        """How many files the tensors of `part` are in: by their names, so that one that is not listed counts."""
        names = [match for entry in self.files if entry.part == part and (match := _SHARD.fullmatch(entry.name))]
        return max((int(match[2]) for match in names), default=0)

    def to_bytes(self) -> bytes:
        """The file's content."""
        # As they will be read: the checksum is over that.
        told = json.loads(json.dumps(_without(vars(self), "files")))
        files = "[" + ",".join(map(_canonical_entry, self.files)) + "]"
        told["xxh3"] = checksum(_object({**_each(told), "files": files}).encode())
        return _text(told, self.files).encode()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The manifest at `path`. Raises CheckpointError that says what is wrong with it, NewerFormatError, OSError."""
        try:
            told = json.loads(read_text_file(path))
            found, release = told["format"], told["release"]
        except FileNotFoundError:
            raise CheckpointError(f"{MANIFEST} is missing") from None
        except (ValueError, RecursionError, MemoryError, KeyError, TypeError):
            raise CheckpointError(f"{MANIFEST} is cut short or not JSON") from None
        if isinstance(found, int) and found > FORMAT:
            raise NewerFormatError(
                f"cannot read {path.parent}: it has format {found}, written by tidemill {release}, and tidemill "
                f"{tidemill.__version__} reads formats up to {FORMAT}; use tidemill {release} or later"
            )
        try:
            if told.pop("xxh3") != _checksum(told):
                raise CheckpointError(f"the checksum of {MANIFEST} differs")
            return cls._from_json(told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST} lacks or garbles a field ({error})") from None

    @classmethod
    def _from_json(cls, fields: dict[str, Any]) -> Self:
        files = tuple(_file_entry(entry) for entry in fields.pop("files"))
        check_manifest(fields)
        return cls(**fields | {"files": files, "parts": tuple(fields["parts"])})


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _text(told: Mapping[str, Any], entries: Iterable[FileEntry]) -> str:
    """JSON for people too: a line for each field, file and slice, however many slices there are."""
    encode = json.JSONEncoder().encode
    files = []
    for entry in entries:
        slices = Slices.of(entry.slices).lines
        files.append(f'{encode(_without(vars(entry), "slices"))[:-1]}, "slices": [\n    {slices}]}}')
    lines = [f'"{key}": {encode(value)}' for key, value in told.items()]
    lines.append('"files": [\n  ' + ",\n  ".join(files) + "]")
    return "{\n " + ",\n ".join(lines) + "\n}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _each(fields: Mapping[str, Any]) -> dict[str, str]:
    return {key: _canonical(value) for key, value in fields.items()}


def _object(texts: Mapping[str, str]) -> str:
    """`_canonical` of what has these texts by key."""
    return "{" + ",".join(f"{_canonical(key)}:{texts[key]}" for key in sorted(texts)) + "}"


def _canonical_entry(entry: FileEntry) -> str:
    return _object({**_each(_without(vars(entry), "slices")), "slices": Slices.of(entry.slices).canonical})


def _file_entry(fields: dict[str, Any]) -> FileEntry:
    check_entry(fields)
    name = fields["name"]
    if name != Path(name).name or name in ("", ".", "..", MANIFEST):
        raise ValueError(f"{name!r} is no file name")
    slices = Slices(map(_slice, fields.pop("slices")))
    return FileEntry(**fields | {"slices": slices, "blocks": tuple(fields.get("blocks", ()))})


def _slice(fields: dict[str, Any]) -> Slice:
    check_slice(fields)
    for key in ("global_shape", "offset", "local_shape"):
        fields[key] = tuple(fields[key])
    return Slice(**fields)


def _checksum(fields: dict[str, Any]) -> str:
    return checksum(_canonical(fields).encode())


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries that shape a run, without importing them; looked up once."""
    versions = {"python": platform.python_version(), "tidemill": tidemill.__version__}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
