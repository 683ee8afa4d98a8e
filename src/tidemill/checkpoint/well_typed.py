"""Whether what was read of a manifest is of the types that it is used as: a checksum only says who wrote it."""

import math
from collections.abc import Mapping
from typing import Any

from tidemill.checkpoint.safetensors_header import ITEM_BYTES

__all__ = ["check_entry", "check_manifest", "check_slice", "is_count"]


_LONGEST_NAME = 255
_INT = {int}


def is_count(value: object) -> bool:
    """A whole number from 0 up; true and false are none."""
    return type(value) is int and value >= 0


def check_manifest(fields: Mapping[str, Any]) -> None:
    """All but its files. Raises ValueError that names the field."""
    _demand(fields, ("step", "attempt", "format"), is_count)
    _demand(fields, ("release",), _is_text)
    _demand(fields, ("parts",), _is_texts)
    _demand(fields, ("identity", "versions"), lambda value: isinstance(value, Mapping) and _is_texts([*value.values()]))
    _demand(fields, ("settings",), lambda value: isinstance(value, Mapping))
    _demand(fields, ("retention",), _is_rule)
    _demand(fields, ("time",), lambda value: type(value) in (int, float) and math.isfinite(value) and value >= 0)
    if len(set(fields["parts"])) != len(fields["parts"]):
        raise ValueError("parts has a name twice")


def check_entry(fields: Mapping[str, Any]) -> None:
    """A file, but for its slices. Raises ValueError that names the field."""
    _demand(fields, ("name", "part", "xxh3"), lambda value: _is_text(value) and len(value) <= _LONGEST_NAME)
    _demand(fields, ("bytes",), is_count)
    _demand(fields, ("blocks",), _is_texts)


def check_slice(fields: Mapping[str, Any]) -> None:
    """A piece of a tensor. Raises ValueError that names the field."""
    shapes = (fields["global_shape"], fields["offset"], fields["local_shape"])
    if not isinstance(fields["name"], str) or fields["dtype"] not in ITEM_BYTES:
        raise ValueError(f"the slice of {fields['name']!r} has dtype {fields['dtype']!r}")
    for shape in shapes:
        # Of ten thousand slices most of the time is spent here.
        if type(shape) is not list or (shape and (set(map(type, shape)) != _INT or min(shape) < 0)):
            raise ValueError(f"the slice of {fields['name']!r} has a shape that is none")
    if not (is_count(fields["begin"]) and is_count(fields["end"]) and fields["begin"] <= fields["end"]):
        raise ValueError(f"the slice of {fields['name']!r} has no range")


def _demand(fields: Mapping[str, Any], names: tuple[str, ...], holds: Any) -> None:
    for name in names:
        if name in fields and not holds(fields[name]):
            raise ValueError(f"{name} cannot be {str(fields[name])[:40]}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_rule(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(one) or is_count(one) for one in value.values())
