"""What reward functions return, as JSON values; runs in the reward process.

Accepted: a list, a tuple, a one-dimensional array or tensor, or an iterator (read once) with one entry an answer, or
an object of answer id to entry, matched by id. An entry is a finite number (True and False count as 1 and 0; scalars of
numpy and torch are read by `item`), None to abstain, or an object with a number under `score`: its other numbers become
parts of the score, its text under `reason` the reason. All else is refused, not guessed at.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["BrokenContractError", "entries", "entry"]


class BrokenContractError(Exception):
    """What came back as a whole cannot be matched with the answers."""


def entries(output: Any, ids: Sequence[str]) -> list[Any]:
    """One entry an answer, in the order of `ids`. Raises BrokenContractError."""
    if isinstance(output, Mapping):
        return _by_id(output, ids)
    if isinstance(output, Iterator):
        # One more than wanted is enough to know that there are too many, of an endless one too.
        output = list(itertools.islice(output, len(ids) + 1))
    if hasattr(output, "tolist"):
        output = output.tolist()
    if not isinstance(output, list | tuple):
        raise BrokenContractError(f"returned {_shown(output)} for {len(ids)} answers; return a list of numbers")
    if len(output) != len(ids):
        more = "more than " if len(output) > len(ids) else ""
        counted = f"{more}{len(ids)}" if more else str(len(output))
        raise BrokenContractError(f"returned {counted} values for {len(ids)} answers; return one an answer")
    return list(output)


def _by_id(output: Mapping[Any, Any], ids: Sequence[str]) -> list[Any]:
    missing = [id for id in ids if id not in output]
    if missing or len(output) != len(ids):
        what = f"none for {missing[0]}" if missing else "others besides"
        raise BrokenContractError(
            f"returned an object with {len(output)} rewards for {len(ids)} answers, {what}; "
            "its keys must be the ids of the answers"
        )
    return [output[id] for id in ids]


def entry(value: Any) -> dict[str, Any]:
    """An entry as `{"value": number or None, "reason": text, "parts": {name: number}}`.

    Raises ValueError, saying why, when it is no reward.
    """
    if value is None:
        return {"value": None, "reason": "", "parts": {}}
    if not isinstance(value, Mapping):
        return {"value": _number(value), "reason": "", "parts": {}}
    if "score" not in value:
        raise ValueError(f"{_shown(value)} has no 'score'")
    parts = {str(name): _number(part) for name, part in value.items() if name not in ("score", "reason")}
    score = None if value["score"] is None else _number(value["score"])
    return {"value": score, "reason": str(value.get("reason", "")), "parts": parts}


def _number(value: Any) -> float:
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = _item(value)
    if not isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a whole number too large for a reward") from error
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _item(value: Any) -> Any:
    try:
        return value.item()
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{_shown(value)} is not one number") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
