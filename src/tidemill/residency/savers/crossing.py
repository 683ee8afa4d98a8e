"""Slabs and their pages, and the copies between them."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.arena import Arena, Place
from tidemill.residency.leaks import Kept
from tidemill.residency.ledger import NO_SLAB
from tidemill.residency.pages import PageRun
from tidemill.residency.slabs import Slab
from tidemill.residency.transfer import Pair, Transfer

__all__ = ["Captured", "Crossing", "Outgoing", "check_key"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a capture did: bytes copied to the host, and seconds waited for readers of the host copy.

    `beside` are bytes whose copy was begun before the capture, beside other work; `copied` are the others.
    """

    copied: int = 0
    beside: int = 0
    waited: float = 0.0


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A slab on its way out: `copied` returns when it is in its pages, but for those that a reader keeps from it."""

    slab: int
    copied: Callable[[], None]
    late: list[Place]


@dataclass(frozen=True, eq=False)
class _Begun:
    """What was begun to be copied out as contents `key`."""

    key: Hashable
    slabs: list[Outgoing]


_NOTHING_BEGUN = _Begun(None, [])


def check_key(key: Hashable) -> None:
    """Raises ResidencyError for what cannot stand for contents."""
    if key is None:
        raise ResidencyError("cannot seal under None, which means unsealed; use a counter of changes")


class Crossing:
    """Copies slabs, by number, out to pages and back; frees and allocates their memory.

    A slab may be on its way in when a call returns: `arrive` is to be called before anybody touches it.
    """

    def __init__(self, slabs: Sequence[Slab], arena: Arena, transfer: Transfer, *, seconds: float) -> None:
        """`seconds` is the longest wait for a page that is read, of which no reader lets go of anything."""
        self.slabs = slabs
        self.arena = arena
        self.transfer = transfer
        self._seconds = seconds
        self._arriving: dict[int, Callable[[], None]] = {}
        self._begun = _NOTHING_BEGUN
        self._lock = threading.Lock()

    def kept(self) -> list[Kept]:
        """For the account of what is on a device, or beside it on the host."""
        awake = [slab.memory for slab in self.slabs if slab.memory.resident]
        return [Kept(self.arena.memory), *(Kept(memory.flat, counted=memory.counted) for memory in awake)]

    def awake(self) -> list[int]:
        """Slabs on the device."""
        return [number for number, slab in enumerate(self.slabs) if slab.memory.resident]

    def asleep(self, part: Part) -> list[int]:
        """Slabs of `part` that are not."""
        return [number for number, slab in enumerate(self.slabs) if slab.part in part and not slab.memory.resident]

    def resident_part(self) -> Part:
        """The parts that are on the device whole."""
        parts, asleep = Part.NONE, Part.NONE
        for slab in self.slabs:
            parts |= slab.part
            asleep |= Part.NONE if slab.memory.resident else slab.part
        return parts & ~asleep

    def bytes_with(self, part: Part) -> int:
        """Of the slabs of `part`, wherever they are, and of those on the device whose own part is not there whole."""
        if part and not any(slab.part in part for slab in self.slabs):
            return 0
        torn = Part.NONE
        for number in self.awake():
            torn |= self.slabs[number].part
        torn &= ~self.resident_part()
        return sum(
            slab.bytes for slab in self.slabs if slab.part in part or (slab.part in torn and slab.memory.resident)
        )

    def held(self, number: int) -> torch.Tensor | PageRun:
        """Where a slab's bytes are now; those of NO_SLAB are nowhere."""
        if number == NO_SLAB:
            return torch.empty(0, dtype=torch.uint8)
        memory = self.slabs[number].memory
        return memory.flat if memory.resident else self.arena.run(number)

    def bytes(self, numbers: Iterable[int]) -> int:
        """Of these slabs together."""
        return sum(self.slabs[number].bytes for number in numbers)

    def out(self, number: int) -> Outgoing:
        """Start copying a slab to pages. Those that cannot be written yet, as they are read, are left."""
        return self._out_all([number])[0]

    def _out_all(self, numbers: Iterable[int]) -> list[Outgoing]:
        late: dict[int, list[Place]] = {}

        def pairs(number: int) -> list[Pair]:
            faults.point("residency.capture.slab")
            found, late[number] = self._out(self.arena.places(number))
            return found

        self.transfer.begin()
        marks = self.transfer.copy_all(map(pairs, numbers))
        return [Outgoing(number, mark, late[number]) for number, mark in zip(late, marks, strict=True)]

    def _out(self, places: Iterable[Place]) -> tuple[list[Pair], list[Place]]:
        """What is to be copied to pages that can be written, and the places of others."""
        pairs, left = list[Pair](), list[Place]()
        for place in places:
            page = self.arena.writable(place)
            if page is None:
                left.append(place)
            else:
                start = place[1] * self.arena.page_bytes
                pairs.append((page, self.slabs[place[0]].memory.flat[start : start + page.numel()]))
        return pairs, left

    def out_all(self, numbers: Iterable[int]) -> list[Outgoing]:
        """`out` of each; when that fails, nothing is under way."""
        try:
            return self._out_all(numbers)
        except BaseException:
            self.transfer.finish()
            raise

    def begin_out(self, key: Hashable) -> None:
        """Start copying out all that is awake, as contents `key`: who comes with the same key goes on from there."""
        if self._begun.key == key:
            return
        self.forget()
        self._begun = _Begun(key, self.out_all(self.awake()))

    def take_over(self, key: Hashable) -> list[Outgoing]:
        """What `begin_out` began, for the caller to end; nothing, and no longer under way, if that was another key."""
        if self._begun.key != key:
            self.forget()
        begun, self._begun = self._begun, _NOTHING_BEGUN
        return begun.slabs

    def end_out(self, key: Hashable, waiting: Callable[[], None]) -> Captured:
        """Copy out all that is awake, begun or not; `waiting` is called before pages are waited for that are read."""
        begun = self.take_over(key)
        going = begun or self.out_all(self.awake())
        waiting()
        waited = self.out_late([place for slab in going for place in slab.late])
        beside, copied = self.bytes_gone(begun), self.bytes(slab.slab for slab in going)
        return Captured(copied=copied - beside, beside=beside, waited=waited)

    def bytes_gone(self, begun: Iterable[Outgoing]) -> int:
        """Of what was begun without a reader in the way."""
        size = self.arena.page_bytes
        return sum(
            self.slabs[slab.slab].bytes
            - sum(min(size, self.slabs[slab.slab].bytes - index * size) for _, index in slab.late)
            for slab in begun
        )

    def forget(self) -> None:
        """What was begun to be copied out is of no use, and no longer under way."""
        if self._begun is not _NOTHING_BEGUN:
            self._begun = _NOTHING_BEGUN
            self.transfer.finish()

    def out_late(self, places: list[Place]) -> float:
        """Copy what `out` left, each page when its reader lets go; seconds waited. All is copied when it returns.

        Raises ResidencyError when that takes too long.
        """
        began, waited = time.monotonic(), 0.0
        try:
            while places:
                self.arena.wait_for(places, since=began, seconds=self._seconds)
                waited = time.monotonic() - began
                pairs, places = self._out(places)
                self.transfer.copy_all([pairs])
        finally:
            self.transfer.finish()
        return waited

    def reserve(self, numbers: Iterable[int]) -> None:
        """That `make_room` of each is fast."""
        slabs = [self.slabs[number] for number in numbers]
        self.transfer.reserve([slab.bytes for slab in slabs if slab.memory.counted])

    def make_room(self, number: int) -> None:
        """Get memory for a slab. Raises what the allocator raises; then nothing has changed."""
        faults.point("residency.restore.slab")
        self.slabs[number].memory.allocate()

    def fill(self, number: int) -> None:
        """Start copying a slab in, which has memory."""
        self.fill_all([number])

    def fill_all(self, numbers: Sequence[int]) -> None:
        """Start copying in, one after the other, slabs that all have memory."""
        # Behind what is queued: the allocator may have handed out memory that queued work still uses.
        self.transfer.begin()
        marks = self.transfer.copy_all(map(self._in, numbers))
        with self._lock:
            self._arriving.update(zip(numbers, marks, strict=True))

    def _in(self, number: int) -> Iterable[Pair]:
        flat = self.slabs[number].memory.flat
        return [(flat[start : start + page.numel()], page) for start, page in self.arena.run(number).stretches()]

    @property
    def arriving(self) -> bool:
        """Whether something is on its way in."""
        return bool(self._arriving)

    def arrive(self, numbers: Iterable[int]) -> None:
        """Wait until what was started to come in is there, of these slabs."""
        for number in numbers:
            wait = self._arriving.get(number)
            if wait is not None:
                wait()
                with self._lock:
                    if self._arriving.get(number) is wait:
                        del self._arriving[number]

    def arrive_all(self) -> None:
        """Wait until nothing is on its way in."""
        self.arrive(list(self._arriving))

    def settle(self) -> None:
        """Wait for all copies, and for what the device still does with the memory."""
        self.quiet()
        self.forget()
        self.transfer.finish()

    def quiet(self) -> None:
        """Wait for what comes in, and for what the device still does with the memory; what goes out goes on."""
        self.arrive_all()
        self.transfer.quiet()

    def check_can_free(self, numbers: Iterable[int]) -> None:
        """Raises ResidencyError for a slab whose memory is lent to somebody."""
        for number in numbers:
            slab = self.slabs[number]
            try:
                slab.memory.check_can_free()
            except ResidencyError as error:
                raise ResidencyError(f"cannot release {slab.part.words()}: {error}") from error

    def free(self, number: int) -> None:
        """Give a slab's memory back; what it holds must be in its pages, and be used no more."""
        faults.point("residency.release.slab")
        self.slabs[number].memory.free()

    def make_writable(self) -> None:
        """Every page is one that nobody reads, for contents from elsewhere; waits as `out_late` does."""
        late = [place for number in range(len(self.slabs)) for place in self.arena.places(number)]
        began = time.monotonic()
        while late := [place for place in late if self.arena.writable(place) is None]:
            self.arena.wait_for(late, since=began, seconds=self._seconds)

    def refill(self) -> None:
        """Copy all pages to the slabs, which are awake."""
        self.transfer.begin()
        self.transfer.copy_all(map(self._in, range(len(self.slabs))))
        self.transfer.finish()

    def undo(self, brought: Iterable[int]) -> None:
        """Free again what came in, whether it is there or not."""
        self.transfer.finish()
        for number in brought:
            self._arriving.pop(number, None)
            self.slabs[number].memory.free()
        self.transfer.give_back()
