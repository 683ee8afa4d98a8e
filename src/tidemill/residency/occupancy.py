"""What the lease manager knows of one tenant: who uses which parts, since when, and how often it moved."""

import threading
from collections import Counter

from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Tenant
from tidemill.units import format_bytes

__all__ = ["Occupant"]


class Occupant:
    """Bookkeeping of one tenant. Not thread-safe: the manager holds its lock."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.last_used = 0
        self.sleeps = 0
        self.wakes = 0
        self._parts: Counter[Part] = Counter()
        self._threads: Counter[int] = Counter()

    def missing(self, part: Part) -> Part:
        """What of `part` the tenant has and is not on the device."""
        absent = Part.NONE
        for flag in part & ~self.tenant.resident():
            absent |= flag if self.tenant.footprint(flag) else Part.NONE
        return absent

    @property
    def in_use(self) -> bool:
        """Whether anybody holds a lease."""
        return self._threads.total() > 0

    def used_by_others(self) -> bool:
        """Whether a thread other than this one holds a lease."""
        return any(count > 0 and thread != threading.get_ident() for thread, count in self._threads.items())

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now."""
        return self.tenant.footprint(self.tenant.resident())

    def holdings(self) -> str:
        """`trainer holds 3.0 GiB (weights 1.0 GiB, optimizer 2.0 GiB)`."""
        sizes = {part: self.tenant.footprint(part) for part in self.tenant.resident()}
        parts = ", ".join(f"{part.words()} {format_bytes(size)}" for part, size in sizes.items() if size)
        return f"{self.tenant.name} holds {format_bytes(self.device_bytes)} ({parts})"

    def bytes_with(self, part: Part) -> int:
        """Bytes on the device when `part` is awake besides what is."""
        return self.tenant.footprint(self.tenant.resident() | part)

    def take(self, part: Part) -> None:
        """Count a lease and open the gate for what was not open."""
        for flag in part:
            self._parts[flag] += 1
        self._threads[threading.get_ident()] += 1
        self.tenant.gate.open(part)

    def give_back(self, part: Part, thread: int) -> None:
        """Uncount a lease that `thread` took, and close the gate for parts that nobody uses any more."""
        self._threads[thread] -= 1
        self._threads += Counter()
        for flag in part:
            self._parts[flag] -= 1
            if self._parts[flag] == 0:
                self.tenant.gate.close(flag)
