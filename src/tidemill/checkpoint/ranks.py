"""How many processes a part was spread over: not how many files it has, for some may have nothing to write."""

from collections.abc import Mapping
from typing import Any

__all__ = ["ranks_in_words"]


def ranks_in_words(extra: Mapping[str, Any]) -> str:
    """Of a part's `extra`, see Snapshot: equal words stand for equally many ranks in equally many replicas."""
    ranks, replicas = extra.get("ranks", 1), extra.get("replicas", 1)
    words = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return words if replicas == 1 else f"{words} in {replicas} replicas"
