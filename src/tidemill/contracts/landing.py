"""A checkpoint that is read into the memory of whoever loads it, and verified on the way."""

from typing import Protocol, runtime_checkable

__all__ = ["NOWHERE", "Landable", "Landing"]


class Landing(Protocol):
    """Where a part has the bytes of its tensors put as they are read, while it is not known whether they are right."""

    def land(self, name: str, start: int, data: memoryview) -> None:
        """Flat bytes of the whole tensor `name`, row-major, from its byte `start` on; each byte once, from any thread.

        What has no place is not kept: it is read again when it is loaded.
        """
        ...


class _Nowhere:
    """Implements `Landing`: keeps nothing."""

    def land(self, name: str, start: int, data: memoryview) -> None:
        """See Landing."""


NOWHERE: Landing = _Nowhere()


@runtime_checkable
class Landable(Protocol):
    """A part into whose own memory a checkpoint can be read, once, and verified on the way."""

    def landing(self) -> Landing:
        """For one checkpoint; the next one, and any other use of that memory, makes it worthless.

        A `load` that is given it takes from there what has landed whole.
        """
        ...
