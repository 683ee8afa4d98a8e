"""Leases under a byte budget: a tenant sleeps only when another needs its bytes, and never while it is used."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tidemill.contracts.events import Emit, Memory, PhaseDone, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Swappable, Tenant
from tidemill.errors import ResidencyError, TidemillError
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.occupancy import Occupant
from tidemill.residency.swap import swap
from tidemill.units import format_bytes, format_seconds

__all__ = ["LeaseManager"]


@dataclass(frozen=True)
class _Done:
    """A transition that succeeded: when it began, how long it took, what it did."""

    start: float
    seconds: float
    moved: Moved


class LeaseManager:
    """Grants the device. `budget` is in bytes, `deadline` in seconds: how long a thread waits for another's lease.

    Several leases of one tenant are shared, within a thread and among threads. Every sleep and wake is emitted as a
    `PhaseDone` and followed by a `Memory`; its budget is 0 when there is no limit.
    """

    def __init__(self, *, budget: int, emit: Emit, deadline: float) -> None:
        self._budget = budget
        self._emit = emit
        self._deadline = min(deadline, threading.TIMEOUT_MAX)
        self._occupants: dict[str, Occupant] = {}
        self._changed = threading.Condition(threading.RLock())
        self._clock = 0
        self._closed = False

    def admit(self, tenant: Tenant) -> None:
        """Count from now on what `tenant` already holds on the device; it is idle and the first to be put to sleep.

        A tenant that is asleep when it asks for its first lease needs no admission.
        """
        with self._locked(f"admit {tenant.name}"):
            self._occupant(tenant)

    @contextlib.contextmanager
    def awake(self, tenant: Tenant, part: Part = Part.ALL) -> Iterator[None]:
        """Lease: within the block `part` of `tenant` may be used, and the tenant is not put to sleep.

        Raises ResidencyError, with the ledger in the message, when it cannot fit, when another thread's lease stands
        in the way until the deadline, or when a transition fails; then nothing is granted.
        """
        thread = threading.get_ident()
        with self._locked(f"wake {tenant.name}"):
            occupant = self._occupant(tenant)
            self._make_room(occupant, part)
            self._wake_up(occupant, part)
            occupant.take(part)
            self._touch(occupant)
        try:
            yield
        finally:
            # Without a deadline of its own: leaving must always be counted, and whoever has the lock has a deadline.
            with self._changed:
                occupant.give_back(part, thread)
                self._touch(occupant)
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse further leases; those that are held go on. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def transitions(self) -> Mapping[str, tuple[int, int]]:
        """Sleeps and wakes so far, by tenant: for tests of who moves when."""
        with self._changed:
            return {name: (occupant.sleeps, occupant.wakes) for name, occupant in self._occupants.items()}

    @contextlib.contextmanager
    def _locked(self, doing: str) -> Iterator[None]:
        if not self._changed.acquire(timeout=self._deadline):
            raise ResidencyError(
                f"cannot {doing}: another thread has been putting a tenant to sleep or waking one for "
                f"{format_seconds(self._deadline)}; raise residency.deadline if that is normal here"
            )
        try:
            yield
        finally:
            self._changed.release()

    def _occupant(self, tenant: Tenant) -> Occupant:
        occupant = self._occupants.setdefault(tenant.name, Occupant(tenant))
        if occupant.tenant.gate is not tenant.gate:
            raise ResidencyError(
                f"cannot lease to {tenant.name}: another tenant of that name is known, and messages and figures could "
                f"not tell them apart; give each its own `name`"
            )
        return occupant

    def _touch(self, occupant: Occupant) -> None:
        self._clock += 1
        occupant.last_used = self._clock

    def _make_room(self, asker: Occupant, part: Part) -> None:
        """Put idle tenants to sleep, least recently used first, until `part` fits; none when even all are too few."""
        deadline = time.monotonic() + self._deadline
        while True:
            if self._closed:
                raise ResidencyError(f"cannot wake {asker.tenant.name}: the run is closing and grants no more leases")
            others = [other for other in self._occupants.values() if other is not asker]
            excess = asker.bytes_with(part) + sum(other.device_bytes for other in others) - self._budget
            idle = sorted((other for other in others if not other.in_use), key=lambda other: other.last_used)
            if excess <= sum(other.device_bytes for other in idle):
                break
            if not any(other.used_by_others() for other in others):
                raise ResidencyError(self._refusal(asker, part))
            # Giving up the lock while waiting, also when this thread has it more than once.
            if not self._changed.wait(timeout=deadline - time.monotonic()):
                raise ResidencyError(f"{self._refusal(asker, part)} (waited {format_seconds(self._deadline)})")
        for other in idle:
            if excess <= 0:
                return
            if excess <= other.device_bytes and self._swap(other, asker, part, excess):
                return
            excess -= self._sleep(other)
        if excess > 0:
            raise ResidencyError(self._refusal(asker, part))

    def _swap(self, leaving: Occupant, arriving: Occupant, part: Part, excess: int) -> bool:
        """Both at once, piece by piece, when both can and there is something to bring; whether it was done."""
        out, coming = leaving.tenant, arriving.tenant
        missing = arriving.missing(part)
        if not (isinstance(out, Swappable) and isinstance(coming, Swappable) and missing):
            return False
        room = max(0, arriving.bytes_with(part) - arriving.device_bytes - excess)

        def both() -> Moved:
            gone, come = swap(out, coming, missing, room=room)
            return Moved(
                copied=gone.copied + come.copied,
                beside=gone.beside + come.beside,
                waited=gone.waited,
                left={**gone.left, **come.left},
            )

        done = self._timed(f"put {out.name} to sleep and wake {coming.name} ({missing.words()})", both)
        _refuse_absent(arriving, missing)
        leaving.sleeps, arriving.wakes = leaving.sleeps + 1, arriving.wakes + 1
        self._report(coming.name, "swap", f"{out.name}.sleep and {coming.name}.wake_up({missing.words()})", done)
        return True

    def _refusal(self, asker: Occupant, part: Part) -> str:
        held = asker.device_bytes
        busy = [o for o in self._occupants.values() if o is not asker and o.in_use and o.device_bytes > 0]
        free = max(0, self._budget - held - sum(other.device_bytes for other in busy))
        holders = " and ".join(o.tenant.name for o in busy)
        reason = f"{holders} is in use and cannot sleep" if busy else "nothing else is awake that could sleep"
        ledger = ", ".join(o.holdings() for o in (asker, *busy) if o.device_bytes > 0)
        return (
            f"cannot wake {asker.tenant.name} ({part.words()}): it needs {format_bytes(asker.bytes_with(part) - held)}"
            f", {format_bytes(free)} is free, and {reason}; the budget is {format_bytes(self._budget)}"
            f"{' and ' if ledger else ''}{ledger}: raise residency.budget, or make the "
            "trainer or the engine smaller; `tidemill plan` shows where the bytes go"
        )

    def _sleep(self, occupant: Occupant) -> int:
        tenant, before = occupant.tenant, occupant.device_bytes
        if before == 0:
            return 0
        done = self._timed(f"put {tenant.name} to sleep", tenant.sleep)
        left = occupant.device_bytes
        if left >= before:
            raise ResidencyError(
                f"{tenant.name} went to sleep and still holds {format_bytes(left)} on the device; give it a saver that "
                "gives memory back, or set residency.offload=never"
            )
        occupant.sleeps += 1
        self._report(tenant.name, "sleep", f"{tenant.name}.sleep", done)
        return before - left

    def _wake_up(self, occupant: Occupant, part: Part) -> None:
        tenant, missing = occupant.tenant, occupant.missing(part)
        if not missing:
            return
        done = self._timed(f"wake {tenant.name} ({missing.words()})", lambda: tenant.wake_up(missing))
        _refuse_absent(occupant, missing)
        occupant.wakes += 1
        self._report(tenant.name, "wake_up", f"{tenant.name}.wake_up({missing.words()})", done)

    def _timed(self, doing: str, transition: Callable[[], Moved]) -> _Done:
        start, began = time.time(), time.perf_counter()
        try:
            moved = transition()
        except TidemillError:
            raise
        except Exception as cause:
            raise ResidencyError(f"could not {doing}: {type(cause).__name__}: {cause}") from cause
        return _Done(start, time.perf_counter() - began, moved)

    def _report(self, owner: str, name: str, what: str, done: _Done) -> None:
        self._emit(PhaseDone(name=name, start=done.start, seconds=done.seconds, owner=owner))
        self._emit(
            Transition(
                what=what,
                owner=owner,
                start=done.start,
                seconds=done.seconds,
                copied=done.moved.copied,
                beside=done.moved.beside,
                waited=done.moved.waited,
                left=done.moved.left,
            )
        )
        occupants = self._occupants.values()
        self._emit(
            Memory(
                time=time.time(),
                what=what,
                device={o.tenant.name: o.device_bytes for o in occupants},
                host={o.tenant.name: o.tenant.host_bytes() for o in occupants},
                budget=0 if self._budget == NO_LIMIT else self._budget,
            )
        )


def _refuse_absent(occupant: Occupant, woken: Part) -> None:
    absent = occupant.missing(woken)
    if absent:
        raise ResidencyError(
            f"{occupant.tenant.name} woke up and {absent.words()} is not on the device, so it cannot be used; this is "
            "a fault of the tenant, whose `wake_up` must bring what it is asked for or raise"
        )
