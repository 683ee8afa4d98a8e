"""Which weights of an update have come: strict in names, both ways."""

from collections.abc import Collection

from tidemill.errors import WeightSyncError

__all__ = ["Arrivals"]


class Arrivals:
    """Waits for every one of `names` since `begin`, and takes each once."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = dict.fromkeys(names)
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """Wait for every weight from now on, whatever came before."""
        self._arrived.clear()

    def check(self, name: str) -> None:
        """Raises WeightSyncError for a weight that is none of them, or that has come."""
        if name not in self._names or name in self._arrived:
            why = "it came twice" if name in self._arrived else "it has no weight of that name"
            raise WeightSyncError(
                f"cannot load {name} into the engine: {why}; trainer and engine must be built from the same model "
                "folder, and tied weights come once"
            )

    def add(self, name: str) -> None:
        """It is there."""
        self._arrived.add(name)

    def missing(self) -> tuple[str, ...]:
        """Those that have not come since `begin`."""
        return tuple(name for name in self._names if name not in self._arrived)
