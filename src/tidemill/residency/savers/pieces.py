"""Sleep and wake piece by piece, so that another tenant's pieces can cross the bus at the same time."""

import contextlib
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence

import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.savers.crossing import Captured, Crossing, Outgoing
from tidemill.units import format_bytes, format_seconds

__all__ = ["bring_all", "bring_in", "free_all", "take_out", "told_of_failure"]

# Slabs whose copies are queued before the first of them is waited for: enough that the bus never waits for Python.
_AHEAD = 4


def take_out(crossing: Crossing, key: Hashable | None) -> Generator[int, None, Captured]:
    """Give the memory of every slab back, each when it is copied as contents `key`; yields the bytes that came free.

    What was begun to be copied as such is not copied again; with None all is in the pages, and nothing is copied.
    When it fails it yields 0, so that who came meanwhile can go first; then, or when it is closed, it brings back what
    is gone. When that fails too, as the memory is taken, the rest follows: all is in the pages then. What cannot follow
    stays, and notes on the failure say so.
    """
    numbers, gone = crossing.awake(), list[int]()
    try:
        return (yield from _with_notice(_out_one_by_one(crossing, numbers, gone, key)))
    except BaseException as cause:
        crossing.transfer.finish()
        try:
            bring_all(crossing, gone)
            crossing.arrive(gone)
        except Exception as second:
            cause.add_note(f"and what had left cannot come back ({second}): {_follow(crossing, copy=key is not None)}")
        raise


def free_all(crossing: Crossing) -> None:
    """Give the memory of every slab back, whose contents are in its pages. Raises ResidencyError."""
    awake = crossing.awake()
    crossing.check_can_free(awake)
    try:
        deque(take_out(crossing, None), maxlen=0)
    except Exception as cause:
        now = "all is awake as before" if crossing.awake() == awake else "; ".join(cause.__notes__)
        raise ResidencyError(f"cannot release device memory ({cause}); {now}") from cause


def _with_notice(pieces: Generator[int, None, Captured]) -> Generator[int, None, Captured]:
    """`pieces`, and 0 before what they raise."""
    try:
        return (yield from pieces)
    except GeneratorExit:
        raise
    except BaseException:
        yield 0
        raise


def _out_one_by_one(
    crossing: Crossing, numbers: Sequence[int], gone: list[int], key: Hashable | None
) -> Generator[int, None, Captured]:
    begun = crossing.take_over(key)
    crossing.quiet()
    started = {going.slab: going for going in begun}
    ahead, late = deque[Outgoing](), list[Outgoing]()
    for number in numbers:
        going = started.get(number) or (Outgoing(number, _at_once, []) if key is None else crossing.out(number))
        if going.late:
            late.append(going)
            continue
        ahead.append(going)
        if len(ahead) == _AHEAD:
            yield _freed(crossing, ahead.popleft(), gone)
    while ahead:
        yield _freed(crossing, ahead.popleft(), gone)
    waited = 0.0
    for going in late:
        waited += crossing.out_late(going.late)
        yield _freed(crossing, going, gone)
    crossing.transfer.give_back()
    beside, copied = crossing.bytes_gone(begun), 0 if key is None else crossing.bytes(numbers)
    return Captured(copied=copied - beside, beside=beside, waited=waited)


def _at_once() -> None:
    """Nothing was copied."""


def _freed(crossing: Crossing, going: Outgoing, gone: list[int]) -> int:
    going.copied()
    crossing.free(going.slab)
    gone.append(going.slab)
    return crossing.slabs[going.slab].bytes


def _follow(crossing: Crossing, *, copy: bool) -> str:
    """Take out what is left, at once; what became of it, in words."""
    try:
        waited = _out_at_once(crossing, crossing.awake(), copy=copy)
    except Exception as third:
        left = format_bytes(crossing.bytes(crossing.awake()))
        return (
            f"nor can the rest follow ({third}): {left} stay on the device, and are counted, and the rest is asleep, "
            "with nothing lost; another sleep or wake goes on from there"
        )
    readers = f", after {format_seconds(waited)} of waiting for readers" if waited else ""
    return f"all is asleep now, with nothing lost{readers}"


def _out_at_once(crossing: Crossing, numbers: Sequence[int], *, copy: bool) -> float:
    """Seconds waited."""
    started = crossing.out_all(numbers) if copy else []
    waited = crossing.out_late([place for going in started for place in going.late])
    for number in numbers:
        crossing.free(number)
    crossing.transfer.give_back()
    return waited


def bring_in(crossing: Crossing, numbers: Sequence[int]) -> Generator[int, None, None]:
    """Bring slabs back; yields the bytes of each before it takes them, and 0 when all are on their way.

    Closed or thrown into, or when it fails, it frees again what it brought.
    """
    with _all_or_none(crossing) as brought:
        for number in numbers:
            yield crossing.slabs[number].bytes
            brought.append(number)
            crossing.make_room(number)
            crossing.fill(number)
        yield 0
        crossing.arrive(numbers)


def bring_all(crossing: Crossing, numbers: Sequence[int]) -> None:
    """Bring slabs back at once, or none of them; they are on their way when it returns.

    Room for all of them comes first: an allocator may wait for copies that are under way.
    """
    with _all_or_none(crossing) as brought:
        crossing.reserve(numbers)
        for number in numbers:
            brought.append(number)
            crossing.make_room(number)
        crossing.fill_all(numbers)


@contextlib.contextmanager
def told_of_failure(part: Part, missing: int, device: torch.device) -> Iterator[None]:
    """Whatever is raised while `part` is restored, `missing` bytes of which are not there, as a ResidencyError."""
    try:
        yield
    except Exception as cause:
        raise ResidencyError(
            f"cannot restore {part.words()}: {format_bytes(missing)} of it are not on {device} and cannot be brought "
            f"there ({cause}); all is as before, free memory on the device and try again"
        ) from cause


@contextlib.contextmanager
def _all_or_none(crossing: Crossing) -> Iterator[list[int]]:
    """Slabs that are put into the list are freed again after a failure."""
    brought: list[int] = []
    try:
        yield brought
    except BaseException:
        crossing.undo(brought)
        raise
