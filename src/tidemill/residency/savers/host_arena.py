"""Sleep by copying slabs to pinned host pages and emptying their storages; wake by the way back.

Every registered tensor is re-homed once, at `freeze`, into slabs that we own: storages that a loader made may not be
resizable, and thousands of small ones cost more to free than to copy. Tensor objects, views among the registered
ones and an optimizer's references stay what they are through every sleep.
"""

import threading
from collections.abc import Hashable, Mapping

import torch
from torch import nn

from tidemill import faults
from tidemill.contracts.checkpoint import SavedTensor, Snapshot
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.arena import Arena, Page, map_pinned, map_plain
from tidemill.residency.contents import check_loadable, checksum_of, put_bytes, tensor_bytes
from tidemill.residency.ledger import NO_SLAB, Ledger
from tidemill.residency.registration import Registration
from tidemill.residency.slabs import Slab, build_slabs
from tidemill.residency.transfer import CudaTransfer, HostTransfer, Transfer
from tidemill.units import MIB, format_bytes

__all__ = ["HostArenaSaver"]


class HostArenaSaver:
    """Keeps what a tenant registered, awake on the device or asleep in host pages.

    `add` everything, `freeze`, then any number of `capture(key)`, `release(key)`, `restore(part)`. The key stands for
    the contents: whoever changes a registered tensor uses another key from then on. `page_bytes` bounds a slab that
    holds several tensors. `pin` page-locks the host pages, for a CUDA device.
    """

    def __init__(self, *, device: torch.device | str, page_bytes: int = 64 * MIB, pin: bool) -> None:
        self._device = _numbered(torch.device(device))
        self._page_bytes = page_bytes
        self._map = map_pinned if pin else map_plain
        self._registration = Registration(self._device)
        self._slabs: list[Slab] = []
        self._ledger = Ledger(())
        self._arena = Arena(sizes=(), map_memory=map_plain, idle_spare_bytes=0)
        self._transfer: Transfer = CudaTransfer(self._device) if self._device.type == "cuda" else HostTransfer()
        self._sealed: Hashable | None = None
        self._frozen = False
        self._lock = threading.RLock()

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
        if self._frozen:
            raise ResidencyError(
                f"cannot register {name!r}: the ledger is frozen, and what is not in it does not survive sleep; "
                "create all state before `freeze`, optimizer state included"
            )
        self._registration.add(name, tensor, part, whole=whole, offset=offset)

    def freeze(self) -> None:
        """Move every registered tensor into slabs, get the host pages, and fix the ledger.

        Old storages are freed as their tensors move. If it fails, every tensor still holds its right contents.
        """
        if self._frozen:
            raise ResidencyError("cannot freeze a ledger twice; build another saver for new state")
        slabs, entries = build_slabs(
            self._registration.items(),
            bases=self._registration.bases(),
            page_bytes=self._page_bytes,
            device=self._device,
        )
        self._arena = Arena(
            sizes=[slab.bytes for slab in slabs],
            map_memory=self._map,
            idle_spare_bytes=max(self._page_bytes, sum(slab.bytes for slab in slabs) // 10),
        )
        self._slabs, self._ledger, self._frozen = slabs, Ledger(tuple(entries)), True
        self._registration = Registration(self._device)

    @property
    def ledger(self) -> Ledger:
        """Every entry, in the order of registration."""
        return self._ledger

    @property
    def sealed_key(self) -> Hashable | None:
        """The key under which the pages hold one whole version, or None while they do not."""
        return self._sealed

    def capture(self, key: Hashable) -> int:
        """Copy what is on the device into the pages and seal them under `key`; nothing if they are so already.

        Returns the bytes copied.

        Pages that a snapshot references are left alone: their slabs get others. Parts asleep are sealed as they are.
        """
        with self._lock:
            self._require_frozen("capture")
            if key is None:
                raise ResidencyError("cannot seal under None, which means unsealed; use a counter of changes")
            if self._sealed == key:
                return 0
            self._sealed = None
            copied = self._copy_to_pages()
            self._sealed = key
            return copied

    def _copy_to_pages(self) -> int:
        copied = 0
        self._transfer.begin()
        for index, slab in enumerate(self._slabs):
            if slab.resident:
                faults.point("residency.capture.slab")
                self._transfer.copy(self._writable(index).memory, slab.memory)
                copied += slab.bytes
        self._transfer.finish()
        return copied

    def _writable(self, index: int) -> Page:
        return self._arena.writable(index)

    def release(self, key: Hashable) -> None:
        """Give the device memory back. Refused unless the pages are sealed under `key`, that of the contents now."""
        with self._lock:
            self._require_frozen("release")
            if self._sealed is None or self._sealed != key:
                raise ResidencyError(
                    f"cannot release device memory: its contents are version {key!r} and the host pages hold "
                    f"{'no whole version' if self._sealed is None else repr(self._sealed)}; call `capture` first"
                )
            resident = [slab for slab in self._slabs if slab.resident]
            for slab in resident:
                slab.check_can_empty()
            self._empty(resident)
            self._transfer.give_back()

    def _empty(self, resident: list[Slab]) -> None:
        try:
            for slab in resident:
                faults.point("residency.release.slab")
                slab.empty()
        except Exception as cause:
            self._copy_to_slabs(Part.ALL, [])
            raise ResidencyError(f"cannot release device memory ({cause}); all is awake as before") from cause

    def restore(self, part: Part = Part.ALL) -> int:
        """Bring `part` back to the device. What is there already is left alone. Returns the bytes copied.

        Raises ResidencyError when memory runs out half-way; then everything that this call brought is gone again, and
        the pages are intact.
        """
        with self._lock:
            self._require_frozen("restore")
            brought: list[Slab] = []
            try:
                self._copy_to_slabs(part, brought)
            except BaseException as cause:
                self._transfer.finish()
                for slab in brought:
                    slab.empty()
                self._transfer.give_back()
                if not isinstance(cause, Exception):
                    raise
                raise ResidencyError(
                    f"cannot restore {part.words()}: {format_bytes(self.device_bytes(part))} are needed on "
                    f"{self._device} and slab {len(brought)} failed ({cause}); all is asleep as before, free memory "
                    "on the device and try again"
                ) from cause
            return sum(slab.bytes for slab in brought)

    def _copy_to_slabs(self, part: Part, brought: list[Slab]) -> None:
        asleep = [(index, slab) for index, slab in enumerate(self._slabs) if slab.part in part and not slab.resident]
        for index, slab in asleep:
            brought.append(slab)
            faults.point("residency.restore.slab")
            slab.allocate()
            # Begun anew for each: the allocator may hand out memory that queued work still uses.
            self._transfer.begin()
            self._transfer.copy(slab.memory, self._arena.page(index).memory)
        self._transfer.finish()

    def snapshot(self) -> Snapshot:
        """The sealed pages as tensors by name, awake or asleep, without touching the device.

        They do not change until the snapshot is released, from whatever thread, once or more often.
        """
        with self._lock:
            self._require_frozen("snapshot")
            if self._sealed is None:
                raise ResidencyError("cannot snapshot: the host pages hold no whole version; call `capture` first")
            pages = self._arena.reference()
        held, once = [pages], threading.Lock()

        def release() -> None:
            with once:
                taken = held.pop() if held else []
            self._arena.release(taken)

        return Snapshot(tensors={entry.name: tensor_bytes(entry, pages) for entry in self._ledger}, release=release)

    def load(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Put saved bytes into the device tensors, by way of the pages; all parts must be awake. Unseals.

        Strict: raises CheckpointError, and changes nothing, unless names, dtypes and shapes are the ledger's; and, with
        the device tensors as they were, when the bytes cannot be read or are too few.
        """
        with self._lock:
            self._require_frozen("load")
            check_loadable(self._ledger, tensors)
            if any(not slab.resident for slab in self._slabs):
                raise ResidencyError("cannot load while asleep; take a lease for everything first")
            self._sealed = None
            pages = [self._arena.writable(index) for index in range(len(self._slabs))]
            for entry in self._ledger:
                if entry.slab != NO_SLAB:
                    put_bytes(entry, pages[entry.slab], tensors[entry.name])
            self._transfer.begin()
            for slab, page in zip(self._slabs, pages, strict=True):
                self._transfer.copy(slab.memory, page.memory)
            self._transfer.finish()

    def resident_part(self) -> Part:
        """The parts that are on the device whole; parts without bytes are in none."""
        with self._lock:
            parts, asleep = Part.NONE, Part.NONE
            for slab in self._slabs:
                parts |= slab.part
                asleep |= Part.NONE if slab.resident else slab.part
            return parts & ~asleep

    def device_bytes(self, part: Part) -> int:
        """Bytes of `part` on the device when awake, whether it is or not; alignment included."""
        return sum(slab.bytes for slab in self._slabs if slab.part in part)

    def host_bytes(self) -> int:
        """Bytes of host pages, spare ones included."""
        return self._arena.bytes

    def references(self) -> int:
        """Pages held by snapshots that are not released; 0 when no save is active. For tests of that invariant."""
        return self._arena.references

    def checksums(self) -> dict[str, int]:
        """xxh3 of every tensor's present contents, on the device or asleep. Slow: for tests and for hunting faults."""
        with self._lock:
            return {
                entry.name: checksum_of(entry, self._memory(entry.slab) if entry.slab != NO_SLAB else _EMPTY)
                for entry in self._ledger
            }

    def _memory(self, index: int) -> torch.Tensor:
        slab = self._slabs[index]
        return slab.memory if slab.resident else self._arena.page(index).memory

    def close(self) -> None:
        """Unpin the host pages. Snapshots still held stay readable; nothing else may be called afterwards."""
        with self._lock:
            self._arena.close()

    def _require_frozen(self, doing: str) -> None:
        if not self._frozen:
            raise ResidencyError(f"cannot {doing}: the ledger is open; register all state and call `freeze` first")


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
