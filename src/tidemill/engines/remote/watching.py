"""Who starts and ends a server: nobody here, for one that is only an address."""

from typing import Protocol

__all__ = ["NoProcess", "Process"]


class Process(Protocol):
    """A server's process, as far as it is ours to start again."""

    def alive(self) -> bool:
        """False when it is known to be gone."""
        ...

    def ended(self, within: float) -> bool:
        """Whether it is gone, or will be known to be within so many seconds: asked when it does not answer."""
        ...

    def last_words(self) -> str:
        """How it ended and the end of its log, for a message; empty while it lives."""
        ...

    def restart(self) -> bool:
        """Start it again and wait until it answers; False when that is not ours to do.

        Raises EngineError when it has been started too often, or does not come up.
        """
        ...

    def close(self) -> None:
        """End it and whatever it started. May be called twice."""
        ...


class NoProcess:
    """Somebody else's."""

    def alive(self) -> bool:
        """Nobody here knows better."""
        return True

    def ended(self, within: float) -> bool:
        """Nobody here knows."""
        return False

    def last_words(self) -> str:
        """None are known."""
        return ""

    def restart(self) -> bool:
        """Not ours to do."""
        return False

    def close(self) -> None:
        """Not ours to do."""
