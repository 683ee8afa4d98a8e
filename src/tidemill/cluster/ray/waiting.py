"""Waiting for Ray so that a signal of the driver's comes through."""

from collections.abc import Sequence
from typing import Any

import ray

__all__ = ["SLICE", "fetched", "ready"]

SLICE = 0.1  # seconds: a signal handler of the driver runs between two waits at the latest


def ready(references: Sequence[Any], seconds: float) -> bool:
    """Whether one of them has its value, or its failure, within `seconds`; the value is not brought here."""
    try:
        return bool(ray.wait(list(references), timeout=seconds, fetch_local=False)[0])
    except SystemError as error:
        raise _meant(error) from None


def fetched(reference: Any, seconds: float) -> Any:
    """The value. Raises GetTimeoutError after `seconds`, and RayError as ray.get does."""
    try:
        return ray.get(reference, timeout=seconds)
    except SystemError as error:
        raise _meant(error) from None


def _meant(error: SystemError) -> BaseException:
    """What a signal handler raised while Ray was waiting: it comes out as the cause of a SystemError."""
    return error if error.__cause__ is None else error.__cause__
