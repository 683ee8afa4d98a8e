"""Who may use the device, and when.

A `Tenant` occupies device memory and can give it back. `Residency` grants leases under a byte budget: leaving a lease
makes the tenant evictable, it is put to sleep only when another lease needs the bytes.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tidemill.contracts.footprint import Part

__all__ = ["Gate", "Moved", "Residency", "Swappable", "Tenant"]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a transition did, for those who watch: nothing hangs on it.

    `copied` are bytes that crossed between device and host while it took place; `beside` are those whose crossing began
    before a sleep or may go on behind a wake, beside other work. `waited` are seconds in which a sleep waited for
    readers of the host copy; `left` are device bytes after it that are no part of a tenant, by whoever holds them.
    """

    copied: int = 0
    beside: int = 0
    waited: float = 0.0
    left: Mapping[str, int] = field(default_factory=dict)


class Gate(Protocol):
    """A tenant's door: opened and closed by Residency, checked by every method that touches the device.

    It is the tenant's, not a thread's: while any thread holds a lease it lets all threads in. It guards against use
    that no lease covers, not against two threads that use one tenant at the same time.
    """

    def open(self, part: Part) -> None:
        """Allow the use of `part` from now on, besides what is allowed already."""
        ...

    def close(self, part: Part) -> None:
        """Forbid the use of `part` from now on."""
        ...

    def check(self, part: Part, doing: str) -> None:
        """Raises ResidencyError, naming tenant and operation, unless every part in `part` is allowed."""
        ...


class Tenant(Protocol):
    """Owner of device memory. State changes only after success; each transition is idempotent or refused."""

    @property
    def name(self) -> str:
        """As in messages and in `memory/device/<name>`."""
        ...

    @property
    def gate(self) -> Gate:
        """The gate that every device method of this tenant checks."""
        ...

    def resident(self) -> Part:
        """The parts on the device now."""
        ...

    def footprint(self, part: Part) -> int:
        """Bytes on the device when the parts in `part` are awake, asleep or not now. Parts it does not have count 0."""
        ...

    def host_bytes(self) -> int:
        """Bytes of host memory held for sleeping parts."""
        ...

    def wake_up(self, part: Part) -> Moved:
        """Bring `part` back to the device; only Residency calls it. On failure the tenant is as before."""
        ...

    def sleep(self) -> Moved:
        """Give all device memory back; only Residency calls it. On failure the tenant is as before."""
        ...


@runtime_checkable
class Swappable(Tenant, Protocol):
    """A tenant of this process that can leave, or come, piece by piece, so that another's pieces cross at once."""

    def leave(self) -> Generator[int, None, Moved]:
        """As `sleep`, in pieces: yields the bytes that each gave back, when they are free.

        When it fails it yields 0 and takes nothing yet, so that what came in its place can go first; resumed then, it
        undoes itself and raises. Closed before its end it undoes itself, too. Undone, the tenant is awake as before;
        when the memory for that is gone, it is asleep whole, with nothing lost. What readers of its host copy keep from
        that stays on the device, which `footprint` counts: a later sleep or wake goes on from there.
        """
        ...

    def arrive(self, part: Part) -> Generator[int, None, Moved]:
        """As `wake_up`, in pieces: yields the bytes of each before it takes them, and 0 behind the last.

        When it fails, or is closed before its end, it undoes itself, and the tenant is as before.
        """
        ...


class Residency(Protocol):
    """Grants the device."""

    def awake(self, tenant: Tenant, part: Part = Part.ALL) -> AbstractContextManager[None]:
        """Lease: within the block `tenant` may be used and is not put to sleep. Re-entrant and counted.

        Raises ResidencyError, with the ledger in the message, when it cannot fit.
        """
        ...

    def close(self) -> None:
        """Refuse further leases."""
        ...
