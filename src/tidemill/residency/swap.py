"""One tenant goes while another comes: the bus carries both directions at once."""

import contextlib
from collections.abc import Generator

from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Swappable
from tidemill.errors import ResidencyError
from tidemill.units import format_bytes

__all__ = ["swap"]


def swap(leaving: Swappable, arriving: Swappable, part: Part, *, room: int) -> tuple[Moved, Moved]:
    """`leaving` sleeps and `part` of `arriving` wakes; what each moved.

    Together they never take more device bytes than `leaving` does now and `room`. After a failure both are as before,
    or, when the memory for that is gone, asleep with nothing lost. Raises ResidencyError when it cannot fit at all.
    """
    with contextlib.ExitStack() as stack:
        # Undone in this order: who came gives its memory back first, so that who left has room to return.
        out = stack.enter_context(_Pieces(leaving.leave()))
        coming = stack.enter_context(_Pieces(arriving.arrive(part)))
        while needed := coming.next():
            while needed > room:
                freed = out.next()
                if freed is None:
                    raise ResidencyError(
                        f"cannot swap {leaving.name} for {arriving.name}: a piece of {format_bytes(needed)} has "
                        f"{format_bytes(room)} when all of {leaving.name} is gone; raise residency.budget"
                    )
                room += freed
            room -= needed
        # All of it is on its way; it can still go back, should the rest of the other fail.
        while out.next() is not None:
            pass
        coming.next()
    return out.moved, coming.moved


class _Pieces:
    """A tenant on its way, piece by piece; left by an exception before its end, it goes back."""

    def __init__(self, pieces: Generator[int, None, Moved]) -> None:
        self._pieces = pieces
        self.moved = Moved()

    def next(self) -> int | None:
        """Bytes of the next piece, or None when there is none."""
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.moved = end.value
            return None

    def __enter__(self) -> "_Pieces":
        return self

    def __exit__(self, *failure: object) -> None:
        self._pieces.close()
