"""The kinds of values that settings are made of: each states its constraint and says how it may be written.

One rule for all intervals: an integer, 0 is off, negative is refused. Sizes are bytes and may be written `"12 GiB"`.
Paths are made absolute once, against the folder in which the command was given; `~` is the home folder.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from tidemill.units import parse_bytes

__all__ = [
    "AbsolutePath",
    "AutoCount",
    "Budget",
    "Count",
    "Fraction",
    "Interval",
    "Label",
    "MismatchLimit",
    "Names",
    "NonNegative",
    "Offload",
    "OptionalPath",
    "Positive",
    "Precision",
    "Seconds",
    "Size",
    "Spare",
    "Texts",
    "TokenIds",
    "absolute",
    "as_tuple",
    "compute_dtype",
    "refuse",
]


_LONGEST_NAME = 255
_LONGEST_PATH = 4096
_YEAR = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Label:
    """How a kind is called in the reference. `text` kinds want text even where a word would be a number."""

    name: str
    text: bool = False


def refuse(sentence: str) -> PydanticCustomError:
    """An error whose message is `sentence` as it stands; raise it in a validator."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def absolute(text: str, folder: Path) -> Path:
    """`text` with `~` expanded, made absolute against `folder`, without `.` and `..`."""
    if not text.strip():
        raise refuse("is empty; write a path")
    if "\0" in text:
        raise refuse("holds a NUL character, which no path can")
    try:
        expanded = Path(text).expanduser()
    except RuntimeError as error:
        raise refuse(f"cannot expand {text!r}: there is no such user") from error
    # Lexical on purpose: a folder that is a link keeps the name that its user gave it.
    path = Path(os.path.abspath(folder / expanded))  # noqa: PTH100
    if len(os.fsencode(path)) >= _LONGEST_PATH or max(len(os.fsencode(part)) for part in path.parts) > _LONGEST_NAME:
        raise refuse(f"is too long for a path: names have up to {_LONGEST_NAME} bytes, paths {_LONGEST_PATH - 1}")
    return path


def folder_of(info: ValidationInfo) -> Path:
    """The folder against which relative paths are read."""
    return (info.context or {}).get("folder") or Path.cwd()


def _path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str | Path):
        return absolute(str(value), folder_of(info))
    raise refuse("should be a path, as text")


def _optional_path(value: object, info: ValidationInfo) -> object:
    return None if value is None or value == "" else _path(value, info)


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise refuse(str(error)) from error


def _budget(value: object) -> object:
    if value == "auto":
        return value
    size = _size(value)
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise refuse('should be "auto" or a size above 0, for example "12 GiB"')
    return size


def _spare(value: object) -> object:
    if value == "auto":
        return value
    size = _size(value)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise refuse('should be "auto" or a size, for example "2 GiB"; 0 is none')
    return size


def _within_a_year(value: float) -> float:
    """No system waits for ever: what is meant as "no limit" is said as a number that every clock can count to."""
    if value > _YEAR:
        raise refuse(f"is longer than a year; write seconds, {_YEAR:.0f} at most")
    return value


def _mismatch(value: object) -> object:
    if value in ("auto", "off"):
        return value
    # A whole number may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise refuse('should be "auto", "off" or nats above 0, for example 0.05')
    return float(value)


def _auto_count(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise refuse('should be "auto" or a whole number above 0')
    return value


def as_tuple(value: Any) -> Any:
    """TOML has arrays, frozen settings have tuples."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, tuple):
        return value
    raise refuse('should be a list, for example ["a", "b"] or [1, 2]')


def _distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({name for name in value if value.count(name) > 1})
    if twice:
        raise refuse(f"names {', '.join(twice)} more than once")
    return value


Interval = Annotated[int, Field(ge=0), Label("interval in steps, 0 is off")]
Count = Annotated[int, Field(gt=0)]
AutoCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_count, json_schema_input_type=int | str),
    Label('"auto" or integer > 0'),
]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0), AfterValidator(_within_a_year), Label("seconds")]
Size = Annotated[int, Field(gt=0), BeforeValidator(_size, json_schema_input_type=int | str), Label("size")]
Budget = Annotated[
    int | Literal["auto"],
    PlainValidator(_budget, json_schema_input_type=int | str),
    Label('"auto" or size'),
]
Spare = Annotated[
    int | Literal["auto"],
    PlainValidator(_spare, json_schema_input_type=int | str),
    Label('"auto", 0 or size'),
]
MismatchLimit = Annotated[
    float | Literal["auto", "off"],
    PlainValidator(_mismatch, json_schema_input_type=float | str),
    Label('"auto", "off" or nats'),
]
AbsolutePath = Annotated[
    Path, BeforeValidator(_path), WithJsonSchema({"type": "string", "format": "path"}), Label("path", text=True)
]
OptionalPath = Annotated[
    Path | None,
    BeforeValidator(_optional_path),
    WithJsonSchema({"type": ["string", "null"], "format": "path"}),
    Label('path, "" for none', text=True),
]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(_distinct), Label("list of names")]
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), Label("list of texts, none empty")
]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_tuple), Label("list of token ids")]
Precision = Literal["auto", "float32", "bfloat16"]
Offload = Literal["auto", "always", "never"]


def compute_dtype(wanted: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32 elsewhere."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" else "float32"
