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

    Together they never take more device bytes than `leaving` does now and `room`, also when one fails; then both are as
    before, or, when the memory for that is gone, asleep with nothing lost. Raises ResidencyError when it cannot fit at
    all, and when `leaving` still holds what it said it gave back.
    """
    held = leaving.footprint(leaving.resident())
    with contextlib.ExitStack() as stack:
        # Undone in this order: who came gives its memory back first, so that who left has room to return.
        out = stack.enter_context(_Pieces(leaving.leave()))
        coming = stack.enter_context(_Pieces(arriving.arrive(part)))
        while needed := coming.next():
            while needed > room:
                freed = _next_out(out, coming)
                if freed is None:
                    raise ResidencyError(
                        f"cannot swap {leaving.name} for {arriving.name}: a piece of {format_bytes(needed)} has "
                        f"{format_bytes(room)} when all of {leaving.name} is gone; raise residency.budget"
                    )
                room += freed
            room -= needed
        # All of it is on its way; it can still go back, should the rest of the other fail.
        while _next_out(out, coming) is not None:
            pass
        _check_gave(leaving, out.bytes, held=held)
        coming.next()
    return out.moved, coming.moved


class _Pieces:
    """A tenant on its way, piece by piece; left by an exception before its end, it goes back."""

    def __init__(self, pieces: Generator[int, None, Moved]) -> None:
        self._pieces = pieces
        self.moved = Moved()
        self.bytes = 0

    def next(self) -> int | None:
        """Bytes of the next piece, or None when there is none."""
        try:
            size = next(self._pieces)
        except StopIteration as end:
            self.moved = end.value
            return None
        self.bytes += size
        return size

    def close(self) -> None:
        """Go back."""
        self._pieces.close()

    def __enter__(self) -> "_Pieces":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _next_out(out: _Pieces, coming: _Pieces) -> int | None:
    """The next piece of who leaves. When it cannot, it takes back what it gave, and raises: who came goes first."""
    freed = out.next()
    if freed == 0:
        coming.close()
        return out.next()
    return freed


def _check_gave(tenant: Swappable, gave: int, *, held: int) -> None:
    left = tenant.footprint(tenant.resident())
    if left > max(0, held - gave):
        raise ResidencyError(
            f"{tenant.name} left, said that it gave back {format_bytes(gave)} of {format_bytes(held)}, and still "
            f"holds {format_bytes(left)} on the device; give it a saver that gives memory back, or set "
            "residency.offload=never"
        )
