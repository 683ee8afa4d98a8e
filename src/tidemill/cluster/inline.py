"""One process for everything: the driver calls the workers directly."""

from collections.abc import Callable
from typing import TypeVar

__all__ = ["InlineCluster"]

T = TypeVar("T")


class InlineCluster:
    """Implements `Cluster`: there is only here."""

    def place(self, build: Callable[[], T]) -> T:
        """Built at once, in this process."""
        return build()

    def close(self) -> None:
        """Nothing was started."""
