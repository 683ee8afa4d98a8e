"""The driver's stand-in for a tenant whose memory lies in workers: one decision, carried out on all of them.

The gate is here, so that use without a lease raises in the caller's line; every call carries its state to the workers,
whose own gates follow. What is counted is the worker with the most: the ledger's maximum over ranks.

A transition that fails on some workers is undone on the others, so that all are as before it. When that is not to be
had, because a worker died or stands elsewhere than its siblings, nothing is on the device any more and every later use
is refused with the reason.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.cluster.failures import raise_failure
from tidemill.cluster.tenant_service import Description, Used
from tidemill.cluster.words import doing
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate, Moved
from tidemill.contracts.workers import Pending, WorkerGroup
from tidemill.errors import ResidencyError, WorkerError
from tidemill.residency.gate import TenantGate

__all__ = ["Deadlines", "TenantProxy"]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a worker may take: for work, for going to sleep or waking, and for answering beside its work."""

    work: float
    transition: float
    control: float = 60.0

    def of(self, method: str) -> dict[str, Any]:
        """What a group's call of a service's `method` is told: the deadline, and words about it for messages."""
        moves = method in _MOVES
        return {
            "deadline": self.transition if moves else self.work,
            "doing": doing(method),
            "setting": "residency.deadline" if moves else "cluster.deadline",
        }


class TenantProxy:
    """Implements `Tenant` over `group`, whose services are `TenantService`s."""

    def __init__(self, group: WorkerGroup, *, deadlines: Deadlines) -> None:
        self._group = group
        self._deadlines = deadlines
        described: list[Description] = group.call("describe", **deadlines.of("describe"))
        self._name = described[0].name
        self._footprints = [worker.footprint for worker in described]
        self._gate = TenantGate(self._name)
        self._lost = ""
        self._standing: list[Used] = group.call("use", Part.NONE, "stand", **deadlines.of("stand"))

    @property
    def name(self) -> str:
        """That of the workers' tenants."""
        return self._name

    @property
    def gate(self) -> Gate:
        """Opened and closed by Residency, on the driver."""
        return self._gate

    @property
    def group(self) -> WorkerGroup:
        """The workers."""
        return self._group

    @property
    def deadlines(self) -> Deadlines:
        """Of calls to the workers."""
        return self._deadlines

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` of every worker's service, under the gate, with arguments of its own for each; the values."""
        return self._use_each(method, arguments)

    def start(self, worker: int, method: str, *arguments: Any, passed_on: bool = False) -> Pending:
        """As `each`, for one worker, and go on. The answer is a `Used`; `passed_on`: for another call only."""
        self._reach(lambda: [])
        return self._group.start(
            worker, "use", self._allowed(), method, *arguments, doing=doing(method), passed_on=passed_on
        )

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Pending]:
        """As `each`, and go on: `end_each` has the values."""
        return [self.start(worker, method, *each) for worker, each in enumerate(arguments)]

    def end_each(self, method: str, pending: Sequence[Pending]) -> list[Any]:
        """Wait for what `start_each` began."""
        told = self._deadlines.of(method)
        self._standing = self._reach(lambda: self._group.gather(pending, **told))
        return [used.value for used in self._standing]

    def resident(self) -> Part:
        """Parts that are on the device of every worker that has bytes of them."""
        parts, anybodys = Part.ALL, self._known()
        for worker, used in enumerate(self._standing):
            parts &= used.resident | anybodys & ~self._has(worker)
        return parts

    def footprint(self, part: Part) -> int:
        """Bytes on the device of the worker that holds most."""
        return max(sum(size for mine, size in table.items() if mine in part) for table in self._footprints)

    def host_bytes(self) -> int:
        """Of all workers together."""
        return sum(worker.host_bytes for worker in self._standing)

    def wake_up(self, part: Part) -> Moved:
        """Returns when every worker is awake. When one cannot, the others are put back: all are as before."""
        return self._shift_all("wake_up", part)

    def sleep(self) -> Moved:
        """Returns when every worker sleeps. When one cannot, the others are woken again: all are as before."""
        return self._shift_all("sleep")

    def _shift_all(self, method: str, *arguments: Any) -> Moved:
        """A transition of memory, in which no worker needs another; all or nothing."""
        before = [used.resident for used in self._standing]
        told = self._deadlines.of(method)
        try:
            self._standing = self._reach(lambda: self._group.call("shift", method, *arguments, **told))
        except BaseException as cause:
            # A worker is gone, or its answer is: nobody knows any more what lies where.
            self._lose(f"{self._name} could not {_WORDS[method]}: {cause}")
            raise
        for name, used in zip(self._group.names, self._standing, strict=True):
            if used.failure is not None:
                try:
                    raise_failure(name, used.failure)
                except Exception as cause:
                    self._put_back(before, cause)
                    raise
        return _together([used.value for used in self._standing])

    def _put_back(self, before: Sequence[Part], cause: Exception) -> None:
        """Every worker to the parts that it had. When that fails, the workers are ended; `cause` is told."""
        try:
            self._shift_some({w: ("sleep",) for w, parts in enumerate(before) if self._standing[w].resident & ~parts})
            self._shift_some(
                {w: ("wake_up", p) for w, p in enumerate(before) if p & ~self._standing[w].resident & self._has(w)}
            )
        except Exception as second:
            cause.add_note(f"and the others could not be put back ({second}): {self._name}'s workers were ended")
            self._group.close()
            self._lose(f"{self._name}'s workers were ended: after {cause}, the others could not be put back ({second})")

    def _shift_some(self, calls: dict[int, tuple[Any, ...]]) -> None:
        pending = {
            worker: self._group.start(worker, "shift", *call, doing=doing(call[0])) for worker, call in calls.items()
        }
        for worker, answer in pending.items():
            self._standing[worker] = answer.result(self._deadlines.transition)
        for worker in calls:
            failure = self._standing[worker].failure
            if failure is not None:
                raise_failure(self._group.names[worker], failure)

    def _lose(self, reason: str) -> None:
        """Nothing is on the device any more, for a part of it is no whole."""
        self._lost = self._lost or reason
        nothing = Used(value=None, resident=Part.NONE, host_bytes=0)
        self._standing = [dataclasses.replace(nothing) for _ in self._group.names]

    def _reach(self, call: Callable[[], list[Used]]) -> list[Used]:
        if self._lost:
            raise WorkerError(f"cannot reach {self._name} any more: {self._lost}")
        return call()

    def _allowed(self) -> Part:
        return self._gate.allowed

    def _use_all(self, method: str, *arguments: Any) -> list[Any]:
        """The value of `method` on every worker."""
        return self._use_each(method, [arguments] * len(self._group.names))

    def _use_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `_use_all`, with arguments of its own for each worker."""
        calls = [(self._allowed(), method, *each) for each in arguments]
        told = self._deadlines.of(method)
        self._standing = self._reach(lambda: self._group.call_each("use", calls, **told))
        return [used.value for used in self._standing]

    def _refuse_unless_awake(self, part: Part, doing: str) -> None:
        """Raises ResidencyError unless `part` is leased and on every device: the gate first, then the memory."""
        self._gate.check(part, doing)
        absent = part & ~self.resident() & self._known()
        if absent:
            raise ResidencyError(
                f"{self._name}.{doing} needs {absent.words()} on the device and it is asleep; call it inside "
                f"`with residency.awake({self._name}): ...`"
            )

    def _has(self, worker: int) -> Part:
        """The parts of which `worker` has bytes."""
        return _parts(part for part, size in self._footprints[worker].items() if size)

    def _known(self) -> Part:
        """The parts of which some worker has bytes."""
        return _parts(part for table in self._footprints for part, size in table.items() if size)


def _together(moved: Sequence[Moved]) -> Moved:
    """Bytes of all workers; the longest wait, for they wait at once; what is left on the fullest device, by owner."""
    left: dict[str, int] = {}
    for owner, count in (item for each in moved for item in each.left.items()):
        left[owner] = max(left.get(owner, 0), count)
    return Moved(
        copied=sum(each.copied for each in moved),
        beside=sum(each.beside for each in moved),
        waited=max(each.waited for each in moved),
        left=left,
    )


_WORDS = {"wake_up": "wake", "sleep": "sleep"}
_MOVES = {"sleep", "wake_up", "park", "revive", "take_snapshot", "changes"}


def _parts(some: Any) -> Part:
    parts = Part.NONE
    for part in some:
        parts |= part
    return parts
