"""A JSONL file as rows and bad lines: strict JSON, one object a line, every physical line counted from 1.

Lines end at `\\n` and nowhere else, so that other line separators may stand inside strings. Blank lines are skipped, a
byte order mark and a `\\r` before the end are dropped. Refused: bytes that are not UTF-8, a key given twice, `NaN` and
`Infinity`, raw control characters, an id given twice. Half a surrogate pair becomes U+FFFD (`text.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.data.messages import as_messages
from tidemill.data.text import has_surrogates, without_surrogates
from tidemill.errors import DataError

__all__ = ["BadLine", "Row", "RowFile", "read_rows"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt as written. `prompt` is text or a list of messages; `extra` holds every column that has no meaning."""

    line: int
    id: str
    prompt: str | list[dict[str, Any]]
    label: Any
    extra: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is no row, and why."""

    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """What a file holds. `repaired` counts rows in which half a surrogate pair was replaced."""

    rows: tuple[Row, ...]
    bad: tuple[BadLine, ...]
    repaired: int


def read_rows(path: Path) -> RowFile:
    """The rows and bad lines of a file, in its order. Raises DataError when it cannot be read at all."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read prompts from {path}: {error.strerror}; set the path of a JSONL file") from error
    rows: list[Row] = []
    bad: list[BadLine] = []
    lines_of_ids: dict[str, int] = {}
    repaired = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = _parse(line)
            repaired += has_surrogates(value)
            row = _row(number, without_surrogates(value))
            if row.id in lines_of_ids:
                raise ValueError(f"id {row.id!r} was given on line {lines_of_ids[row.id]} already")
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(line=number, reason=_words(error)))
            continue
        lines_of_ids[row.id] = number
        rows.append(row)
    return RowFile(rows=tuple(rows), bad=tuple(bad), repaired=repaired)


def _words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start + 1}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)


def _parse(line: bytes) -> Any:
    return json.loads(
        line.decode("utf-8-sig"),
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=_finite,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} is given twice")
        result[key] = value
    return result


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON; write null or a number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word} is too large for a number")
    return number


def _row(line: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"a line must be an object, not {_kind(value)}")
    if "prompt" not in value:
        raise ValueError("no prompt; write {'prompt': ..., 'label': ...}")
    return Row(
        line=line,
        id=_id(line, value.get("id")),
        prompt=_prompt(value["prompt"]),
        label=value.get("label"),
        extra={key: item for key, item in value.items() if key not in ("id", "prompt", "label")},
    )


def _id(line: int, value: Any) -> str:
    if value is None:
        return f"line-{line}"
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"id must be text or a whole number, not {_kind(value)}")
    return str(value)


def _prompt(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return as_messages(value)
    raise ValueError(f"prompt must be text or a list of messages, not {_kind(value)}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names: dict[type, str] = {str: "empty text" if value == "" else "text", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")
