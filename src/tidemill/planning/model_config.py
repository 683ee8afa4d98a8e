"""A model's config.json, read by name: a value that no model can have is refused before it becomes a size."""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from tidemill.errors import DataError

__all__ = ["MOST_LAYERS", "WIDEST", "ConfigFields"]

WIDEST = 10**7
"""No dimension of a model is larger: what is above is damage, and would be planned for in silence."""

MOST_LAYERS = 10**4
"""Each layer is listed by name."""


class ConfigFields:
    """The fields of a config.json. Each question raises DataError for a value of another kind, and names it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, name: str, default: int = 0, *, most: int = WIDEST) -> int:
        """A number from 1 to `most`; `default`, unless that is 0, when it is absent or null."""
        value = self._config.get(name)
        if value is None and default:
            return default
        if not _is_whole(value) or not 0 < value <= most:
            raise self.refusal(name, f"a number above 0 and up to {most} is needed")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; `default` when it is absent or null."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, "true or false is needed")
        return default if value is None else value

    def numbers(self, name: str) -> frozenset[int]:
        """Whole numbers from 0 up, out of a list; none when it is absent or null."""
        value = self._config.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(_is_whole(item) and item >= 0 for item in value):
            raise self.refusal(name, "a list of whole numbers is needed")
        return frozenset(value)

    def kinds(self, name: str, *, known: frozenset[str], count: int) -> frozenset[str]:
        """Which of `known` are in a list of `count` texts; all of them when it is absent or null."""
        value = self._config.get(name)
        if value is None:
            return known
        if not isinstance(value, list) or len(value) != count or not all(_is_text(item, known) for item in value):
            raise self.refusal(name, f"a list of {count}, one a layer, is needed, each of {', '.join(sorted(known))}")
        return frozenset(value)

    def refusal(self, name: str, needed: str) -> DataError:
        """The error that says what the field has and what is `needed`."""
        return DataError(
            f"cannot plan for this model: its config.json has {name} = {reprlib.repr(self._config.get(name))}, where "
            f"{needed}; use the config.json that came with the weights"
        )


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any, known: frozenset[str]) -> bool:
    return isinstance(value, str) and value in known
