"""Sleep by copying slabs to pinned host pages and freeing their memory; wake by the way back.

Every registered tensor is re-homed once, at `freeze`, into slabs that we own: storages that a loader made may not be
resizable, and thousands of small ones cost more to free than to copy. Tensor objects, views among the registered
ones and an optimizer's references stay what they are through every sleep.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping

import torch
from torch import nn

from tidemill import faults
from tidemill.contracts.checkpoint import SavedTensor, Snapshot
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import NOWHERE, Landing
from tidemill.errors import ResidencyError
from tidemill.planning.machine import available_bytes
from tidemill.residency.contents import PagedTensors, check_loadable, checksum_of
from tidemill.residency.coverage import check_covers
from tidemill.residency.device_memory import MakeDeviceMemory, ResizedStorage
from tidemill.residency.host_memory import FreeBytes, map_pinned, map_plain, refuse_pageable
from tidemill.residency.ledger import Ledger
from tidemill.residency.registration import Registration
from tidemill.residency.savers.crossing import Captured, check_key
from tidemill.residency.savers.landing import Landed
from tidemill.residency.savers.pieces import bring_all, bring_in, free_all, take_out, told_of_failure
from tidemill.residency.savers.preparation import Kept, Preparation, nothing_kept
from tidemill.residency.transfer import numbered, transfer_for
from tidemill.residency.turns import Turn, Turns
from tidemill.units import MIB

__all__ = ["HostArenaSaver"]


class HostArenaSaver:
    """Keeps what a tenant registered, awake on the device or asleep in host pages.

    `add` everything, `freeze`, then any number of `capture(key)`, `release(key)`, `restore(part)`. The key stands for
    the contents: whoever changes a registered tensor uses another key from then on. Calls of several threads wait for
    each other; what only looks, or lets go of a snapshot, waits for nobody.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        page_bytes: int = 64 * MIB,
        spare_bytes: int | None = None,
        pin: bool,
        deadline: float = 300.0,
        warn: Callable[[str], None] = refuse_pageable,
        make_memory: MakeDeviceMemory = ResizedStorage,
        free_host_bytes: FreeBytes = available_bytes,
    ) -> None:
        """`page_bytes` is the size of a host page, and bounds a slab that holds several tensors.

        `spare_bytes` bounds the pages for what changes while a snapshot is read; None is a tenth of the state, and two
        pages at least. With none left a capture waits for readers, `deadline` seconds without progress at most. `pin`
        page-locks the host pages, for a CUDA device; `warn` is told when that cannot be. `make_memory` is the device's.
        """
        self._device = numbered(torch.device(device))
        map_memory = functools.partial(map_pinned, warn=warn) if pin else map_plain
        self._preparation = Preparation(
            device=self._device,
            page_bytes=page_bytes,
            spare_bytes=spare_bytes,
            deadline=deadline,
            map_memory=functools.partial(map_memory, free_bytes=free_host_bytes),
            make_memory=make_memory,
            free_host_bytes=free_host_bytes,
        )
        self._registration = Registration(self._device)
        self._transfer = transfer_for(self._device)
        self._keep(nothing_kept(self._transfer))
        self._turns = Turns(seconds=deadline)
        self._lock = threading.Lock()
        self._sealed: Hashable | None = None
        self._landed = Landed(self._ledger, self._arena.run)
        self._frozen = False

    def _keep(self, kept: Kept) -> None:
        self._ledger, self._claims, self._arena, self._crossing = kept.ledger, kept.claims, kept.arena, kept.crossing

    def follow(self, module: nn.Module) -> None:
        """Allow parameters that FSDP2 shards in `module` to be added, as `tidemill.residency.sharded` tells."""
        self._registration.follow(module)

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        part: Part,
        *,
        whole: tuple[int, ...] | None = None,
        offset: tuple[int, ...] | None = None,
    ) -> None:
        """Register a tensor that must survive sleep; with `whole`, the piece at `offset` of a tensor of that shape.

        A tensor tied to one that is registered (the same elements of the same storage) follows it and gets no entry
        of its own. A DTensor must be a parameter of a followed module, which knows its whole and offset itself.
        Raises ResidencyError after `freeze`, for a name used twice and for what cannot be kept.
        """
        if not faults.skipped(f"residency.add:{name}"):
            self._registration.add(name, tensor, part, whole=whole, offset=offset)

    def freeze(self) -> None:
        """Get the host pages, move every registered tensor into slabs, and fix the ledger.

        Old storages are freed as their tensors move, and given back to the device. Raises ResidencyError, before
        anything moves, when the host has no room for the pages; whatever fails, all contents are still right.
        """
        if self._frozen:
            raise ResidencyError("cannot freeze a ledger twice; build another saver for new state")
        self._keep(self._preparation.keep(self._registration, self._transfer))
        self._frozen = True
        self._registration.close()
        self._transfer.give_back()

    @property
    def ledger(self) -> Ledger:
        """Every entry, in the order of registration."""
        return self._ledger

    def check_covers(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ResidencyError unless `state`, by name, is what is registered, each tensor in its place."""
        check_covers(self._ledger, [slab.memory.flat for slab in self._crossing.slabs], state)

    @property
    def sealed_key(self) -> Hashable | None:
        """The key under which the pages hold one whole version, or None while they do not."""
        return self._sealed

    def _seal(self, key: Hashable | None) -> None:
        self._landed.close()
        # Against a snapshot that is just being taken: it holds its pages before anything is written.
        with self._lock:
            self._sealed = key

    def capture(self, key: Hashable) -> Captured:
        """Copy what is on the device into the pages and seal them under `key`; nothing if they are so already.

        Pages that a snapshot holds are left alone: spare ones take their place, or they are waited for, the others
        being copied first. Meanwhile snapshots can be let go of, and `restore` goes on. Parts asleep are sealed as they
        are. Raises ResidencyError when readers hold it up for too long; then all is as before, but for the seal.
        """
        check_key(key)
        with self._turn("capture") as turn:
            if self._sealed == key:
                return Captured()
            self._crossing.arrive_all()
            self._seal(None)
            captured = self._crossing.end_out(key, lambda: self._turns.admit(turn, "restore"))
            self._seal(key)
            return captured

    def begin_capture(self, key: Hashable) -> None:
        """Start what `capture` of the same key will end, and go on: for one who knows that a sleep follows."""
        check_key(key)
        with self._turn("capture"):
            if self._sealed != key:
                self._crossing.arrive_all()
                self._seal(None)
                self._crossing.begin_out(key)

    def release(self, key: Hashable) -> None:
        """Give the device memory back. Refused unless the pages are sealed under `key`, that of the contents now."""
        with self._turn("release"):
            if self._sealed is None or self._sealed != key:
                raise ResidencyError(
                    f"cannot release device memory: its contents are version {key!r} and the host pages hold "
                    f"{'no whole version' if self._sealed is None else repr(self._sealed)}; call `capture` first"
                )
            free_all(self._crossing)

    def leave(self, key: Hashable) -> Generator[int, None, Captured]:
        """`capture` and `release` in pieces: yields the bytes that each gave back. See Swappable."""
        check_key(key)
        with self._turn("leave", in_pieces=True):
            copy = self._sealed != key
            self._crossing.check_can_free(self._crossing.awake())
            if copy:
                self._seal(None)
            try:
                return (yield from take_out(self._crossing, key if copy else None))
            finally:
                if not self._crossing.awake():
                    self._seal(key)

    def restore(self, part: Part = Part.ALL, *, wait: bool = True) -> int:
        """Bring `part` back to the device. What is there already is left alone. Returns the bytes copied.

        Without `wait` it may still be on its way: call `arrived` before touching any of it. Raises ResidencyError when
        memory runs out half-way; then everything that this call brought is gone again, and the pages are intact.
        """
        with self._turn("restore"):
            numbers = self._crossing.asleep(part)
            with told_of_failure(part, self._crossing.bytes(numbers), self._device):
                bring_all(self._crossing, numbers)
            if wait:
                self._crossing.arrive(numbers)
            return self._crossing.bytes(numbers)

    def arrive(self, part: Part = Part.ALL) -> Generator[int, None, int]:
        """`restore` in pieces: yields the bytes that each takes, before it does, then 0. See Swappable."""
        with self._turn("arrive", in_pieces=True):
            numbers = self._crossing.asleep(part)
            with told_of_failure(part, self._crossing.bytes(numbers), self._device):
                yield from bring_in(self._crossing, numbers)
            return self._crossing.bytes(numbers)

    def arrived(self, names: Collection[str]) -> None:
        """Wait until these tensors are there, if they are on their way; any stream may use them then."""
        if self._crossing.arriving:
            self._crossing.arrive({place[0] for name in names for place in self._claims.places.get(name, ())})

    def snapshot(self) -> Snapshot:
        """The sealed pages as tensors by name, awake or asleep, without touching the device.

        They do not change until the snapshot is released, or is told that they are written, from whatever thread, once
        or more often; from then on reading them is refused.
        """
        self._require_frozen("snapshot")
        with self._lock:
            if self._sealed is None:
                raise ResidencyError("cannot snapshot: the host pages hold no whole version; call `capture` first")
            reading = self._arena.read(self._claims, f"the snapshot of version {self._sealed!r}")
            runs = {number: self._arena.run(number) for number in range(len(self._crossing.slabs))}
        tensors = PagedTensors(self._ledger, runs, reading)
        return Snapshot(tensors=tensors, written=reading.let_go, release=reading.release)

    def landing(self) -> Landing:
        """See Landable; all must be awake. Unseals, and waits for readers as `capture`."""
        with self._turn("load"):
            return self._make_landing()

    def _make_landing(self) -> Landing:
        if self._crossing.asleep(Part.ALL):
            raise ResidencyError("cannot load while asleep; take a lease for everything first")
        self._crossing.settle()
        self._seal(None)
        self._crossing.make_writable()
        self._landed = Landed(self._ledger, self._arena.run)
        return self._landed

    def load(self, tensors: Mapping[str, SavedTensor], *, key: Hashable = None, landing: Landing = NOWHERE) -> None:
        """Put saved bytes into the device tensors, by way of the pages, which are sealed under `key` then, or unsealed.

        All must be awake; what is whole in `landing`, where that is ours, is not read. Strict: raises CheckpointError,
        and changes nothing, unless names, dtypes and shapes are the ledger's; and, with the device tensors as they
        were, when the bytes cannot be read or are too few. Waits for readers as `capture`.
        """
        check_loadable(self._ledger, tensors)
        with self._turn("load"):
            if landing is not self._landed or not self._landed.open:
                self._make_landing()
            self._landed.complete(tensors)
            self._crossing.refill()
            self._seal(key)

    def resident_part(self) -> Part:
        """The parts that are on the device whole; parts without bytes are in none."""
        return self._crossing.resident_part()

    def device_bytes(self, part: Part) -> int:
        """Bytes on the device when `part` alone is awake, whether it is or not, with alignment, and with what stays
        there of parts that are not there whole, for NONE too; a part without bytes takes 0."""
        return self._crossing.bytes_with(part)

    def host_bytes(self) -> int:
        """Bytes of host pages, spare ones included; they do not change."""
        return self._arena.bytes

    def references(self) -> int:
        """Pages held by snapshots that are not released; 0 when no save is active. For tests of that invariant."""
        return self._arena.references

    def checksums(self) -> dict[str, int]:
        """xxh3 of every tensor's present contents, on the device or asleep. Slow: for tests and for hunting faults."""
        with self._turn("take checksums"):
            self._crossing.arrive_all()
            return {entry.name: checksum_of(entry, self._crossing.held(entry.slab)) for entry in self._ledger}

    def close(self) -> None:
        """Unpin the host pages. Snapshots still held stay readable; nothing else may be called afterwards."""
        self._crossing.settle()
        self._arena.close()

    @contextlib.contextmanager
    def _turn(self, doing: str, *, in_pieces: bool = False) -> Iterator[Turn]:
        self._require_frozen(doing)
        with self._turns.take(doing, in_pieces=in_pieces) as turn:
            yield turn

    def _require_frozen(self, doing: str) -> None:
        if not self._frozen:
            raise ResidencyError(f"cannot {doing}: the ledger is open; register all state and call `freeze` first")
