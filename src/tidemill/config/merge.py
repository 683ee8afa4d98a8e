"""Settings as they are read: TOML files and `path=value` words, merged, each value with where it came from.

Tables merge, everything else is replaced, later wins. Nothing here knows which settings exist.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError

__all__ = ["COMMAND_LINE", "NOT_TOML", "Setting", "Tree", "at", "flatten", "merged", "plain", "read_file", "read_word"]

COMMAND_LINE = "command line"
NOT_TOML = object()
"""What a word's right side parses to when it is not TOML."""


@dataclass(frozen=True)
class Setting:
    """A value and its origin: a file as it was named, or the command line. `word` is the text of a right side."""

    value: Any
    origin: str
    word: str | None = None


Tree = dict[str, "Tree | Setting"]


def read_file(path: Path) -> Tree:
    """The settings in a TOML file. Raises ConfigError, naming file and line."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"cannot read settings from {path}: there is no such file; a setting is written path=value"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror}; name a TOML file") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"cannot read settings from {path}: line {line} is not UTF-8 text (byte 0x{raw[error.start]:02x}); "
            "save the file as UTF-8"
        ) from error
    try:
        return _with_origin(tomllib.loads(text.replace("\r\n", "\n")), str(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        hint = "settings are TOML, not YAML" if path.suffix in (".yaml", ".yml") else "correct the file"
        raise ConfigError(f"cannot read settings from {path}: {_lower(str(error))}; {hint}") from error


def read_word(word: str) -> Tree:
    """The setting in `path=value`. The right side is TOML; what is not is kept as text. Raises ConfigError."""
    path, sign, text = word.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(re.fullmatch(r"[A-Za-z0-9_-]+", key) for key in keys):
        raise ConfigError(f"cannot read {word!r} as a setting; write path=value, for example trainer.optimizer.lr=1e-6")
    value = _parsed(text)
    inner: Tree | Setting
    if isinstance(value, dict):
        inner = _with_origin(value, COMMAND_LINE)
    else:
        inner = Setting(value, COMMAND_LINE, text)
    for key in reversed(keys):
        inner = {key: inner}
    assert isinstance(inner, dict)
    return inner


def _parsed(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return NOT_TOML
    # A line break in the text could smuggle in a second setting.
    return table["value"] if list(table) == ["value"] else NOT_TOML


def _with_origin(table: dict[str, Any], origin: str) -> Tree:
    return {
        key: _with_origin(value, origin) if isinstance(value, dict) else Setting(value, origin)
        for key, value in table.items()
    }


def merged(earlier: Tree, later: Tree) -> Tree:
    """Both, where tables merge and all else of `later` replaces what was there. Changes neither."""
    result = dict(earlier)
    for key, value in later.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def flatten(tree: Tree, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Every value with its path."""
    for key, value in tree.items():
        if isinstance(value, Setting):
            yield (*prefix, key), value
        else:
            yield from flatten(value, (*prefix, key))


def plain(tree: Tree) -> dict[str, Any]:
    """The values alone. A word that is not TOML is its text."""
    return {key: plain(value) if isinstance(value, dict) else _value(value) for key, value in tree.items()}


def _value(setting: Setting) -> Any:
    return setting.word if setting.value is NOT_TOML else setting.value


def at(tree: Tree, path: tuple[str, ...]) -> Tree | Setting | None:
    """What stands at `path`, or the value that stands in its way; None when there is neither."""
    node: Tree | Setting | None = tree
    for key in path:
        if not isinstance(node, dict):
            return node
        node = node.get(key)
    return node


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
