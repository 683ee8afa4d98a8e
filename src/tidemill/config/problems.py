"""What is wrong with settings, in words: one line a problem, with path, value, source and a suggestion."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from tidemill.config.base import Settings
from tidemill.config.fields import field_at, leaves, seam_of, sections
from tidemill.config.merge import Setting, Tree, at, flatten

__all__ = ["UNSET", "Problem", "dotted", "problem_of", "report", "toml_text"]

UNSET = object()
"""The value of a problem that is not about a value."""
_LONGEST = 200
_CLOSE = 0.7
_TWO_ITEMS = "should have exactly two items"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong. `path` is dotted; `origin` is a file, `command line`, `default`, or empty."""

    path: str
    text: str
    value: Any = UNSET
    origin: str = ""

    def __str__(self) -> str:
        value = "" if self.value is UNSET else f" = {_short(toml_text(self.value))}"
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.path}{value}{origin}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object; the value as it would be written."""
        value = None if self.value is UNSET else toml_text(self.value)
        return {"path": self.path, "value": value, "origin": self.origin, "text": self.text}


def report(problems: Sequence[Problem]) -> str:
    """The whole message of a ConfigError."""
    lines = [f"{len(problems)} problem(s) in this run's settings:", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def toml_text(value: Any) -> str:
    """A value as it would be written in TOML."""
    if value is None:
        return '""'
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def dotted(path: Sequence[str | int]) -> str:
    """`recorder.use[1]` for ("recorder", "use", 1)."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def problem_of(error: ErrorDetails, config: type[Settings], tree: Tree, values: Mapping[str, Any]) -> Problem:
    """The problem behind an error of pydantic's."""
    path = error["loc"]
    names = tuple(part for part in path if isinstance(part, str))
    origin = _origin(tree, names)
    if error["type"] == "missing" and isinstance(path[-1], int):
        return Problem(path=dotted(path[:-1]), text=_TWO_ITEMS, origin=origin)
    if error["type"] == "missing":
        return Problem(path=dotted(path), text="must be set; it has no default")
    if error["type"] == "extra_forbidden":
        return Problem(path=dotted(path), text=_unknown(names, error["input"], config, values), origin=origin)
    return Problem(path=dotted(path), text=_sentence(error), value=error["input"], origin=origin)


def _origin(tree: Tree, names: tuple[str, ...]) -> str:
    found = at(tree, names)
    if isinstance(found, Setting):
        return found.origin
    return next((setting.origin for _, setting in flatten(found or {})), "")


def _sentence(error: ErrorDetails) -> str:
    match error["type"]:
        case "literal_error":
            expected = str(error["ctx"]["expected"]).replace("'", '"')
            names = expected.replace(" or ", ", ").replace('"', "").split(", ")
            close = difflib.get_close_matches(str(error["input"]).lower(), names, n=1)
            return f"should be {expected}" + (f'; did you mean "{close[0]}"?' if close else "")
        case "model_type" | "model_attributes_type" | "dict_type":
            return "should be a table"
        case "string_type":
            return "should be text, in quotes"
        case "bool_type":
            return "should be true or false"
        case "string_too_short":
            return "should not be empty"
        case "too_long":
            return _TWO_ITEMS
        case "int_type" | "float_type" if isinstance(error["input"], str):
            return f"{error['msg'].removeprefix('Input ')}, not text"
        case _:
            return error["msg"].removeprefix("Input ").removeprefix("Value error, ")


def _unknown(names: tuple[str, ...], value: Any, config: type[Settings], tree: Mapping[str, Any]) -> str:
    what = "section" if isinstance(value, Mapping) else "setting"
    owner = _other_mode(names, config, tree)
    if owner:
        return f"no such {what} {owner}"
    close = _nearest(names, isinstance(value, Mapping), config, tree)
    return f"no such {what}" + (f"; did you mean {' or '.join(map(dotted, close))}?" if close else "")


def _other_mode(names: tuple[str, ...], config: type[Settings], tree: Mapping[str, Any]) -> str:
    """What to say of a setting that another `use` of the same section has."""
    field = field_at(config, tree, names[:-1])
    seam = seam_of(field) if field is not None else None
    if seam is None:
        return ""
    known = dict(seam.builtin) | ({"module:function": seam.function} if seam.function is not None else {})
    others = [use for use, settings in known.items() if names[-1] in settings.model_fields]
    use = tree.get(seam.name, {}).get("use", seam.default)
    return f"with {seam.name}.use = {toml_text(use)}; it belongs to {' and '.join(others)}" if others else ""


def _nearest(
    names: tuple[str, ...], is_table: bool, config: type[Settings], tree: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """The likeliest meant, up to three when equally likely; empty when nothing is near."""
    known = list(sections(config, tree)) if is_table else [leaf.path for leaf in leaves(config, tree)]
    scores = {path: _likeness(names[-1], path[-1]) for path in known}
    scores = {path: score + _nearness(names, path) for path, score in scores.items() if score >= _CLOSE}
    best = max(scores.values(), default=0.0)
    return [path for path, score in scores.items() if score == best][:3]


def _likeness(written: str, known: str) -> float:
    """From 0 to 1. Initials count as the name: `learning_rate` is `lr`."""
    written, known = written.lower().replace("-", "_"), known.lower()
    initials = "".join(part[:1] for part in written.split("_"))
    if len(known) > 1 and initials == known:
        return 1.0
    return difflib.SequenceMatcher(None, written, known).ratio()


def _nearness(names: tuple[str, ...], path: tuple[str, ...]) -> float:
    if names[:-1] == path[:-1]:
        return 0.2
    return 0.05 * sum(written == known for written, known in zip(names[:-1], path[:-1], strict=False))
