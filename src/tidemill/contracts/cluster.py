"""Where workers live."""

from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["Cluster"]

T = TypeVar("T")


class Cluster(Protocol):
    """Places workers; what comes back is used as if it were the worker itself."""

    def place(self, build: Callable[[], T]) -> T:
        """Build one worker where it shall live. `build` says what; the cluster says where."""
        ...

    def close(self) -> None:
        """End what the cluster started. May be called twice."""
        ...
