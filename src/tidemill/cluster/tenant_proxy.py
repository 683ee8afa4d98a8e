"""The driver's stand-in for a tenant whose memory lies in workers: one decision, carried out on all of them.

The gate is here, so that use without a lease raises in the caller's line; every call carries its state to the workers,
whose own gates follow. What is counted is the worker with the most: the ledger's maximum over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.cluster.tenant_service import Description, Used
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate
from tidemill.contracts.workers import WorkerGroup
from tidemill.errors import ResidencyError
from tidemill.residency.gate import TenantGate

__all__ = ["Deadlines", "TenantProxy"]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a worker may take: for work, for going to sleep or waking, and for answering beside its work."""

    work: float
    transition: float
    control: float = 60.0


class TenantProxy:
    """Implements `Tenant` over `group`, whose services are `TenantService`s."""

    def __init__(self, group: WorkerGroup, *, deadlines: Deadlines) -> None:
        self._group = group
        self._deadlines = deadlines
        described: list[Description] = group.call("describe", deadline=deadlines.work)
        self._name = described[0].name
        self._footprints = [worker.footprint for worker in described]
        self._gate = TenantGate(self._name)
        self._standing: list[Used] = []
        self._look()

    @property
    def name(self) -> str:
        """That of the workers' tenants."""
        return self._name

    @property
    def gate(self) -> Gate:
        """Opened and closed by Residency, on the driver."""
        return self._gate

    def resident(self) -> Part:
        """Parts that are on every worker's device."""
        parts = Part.ALL
        for worker in self._standing:
            parts &= worker.resident
        return parts

    def footprint(self, part: Part) -> int:
        """Bytes on the device of the worker that holds most."""
        return max(sum(size for mine, size in table.items() if mine in part) for table in self._footprints)

    def host_bytes(self) -> int:
        """Of all workers together."""
        return sum(worker.host_bytes for worker in self._standing)

    def wake_up(self, part: Part) -> None:
        """Returns when every worker is awake. When one cannot, the others are put back: all are as before."""
        before = [worker.resident for worker in self._standing]
        try:
            self._use_all("wake_up", part, deadline=self._deadlines.transition)
        except Exception as cause:
            self._put_back(before, cause)
            raise

    def sleep(self) -> None:
        """Returns when every worker sleeps. When one cannot, the others are woken again: all are as before."""
        before = [worker.resident for worker in self._standing]
        try:
            self._use_all("sleep", deadline=self._deadlines.transition)
        except Exception as cause:
            self._put_back(before, cause)
            raise

    def _put_back(self, before: Sequence[Part], cause: Exception) -> None:
        try:
            self._look()
            for worker, wanted in enumerate(before):
                if self._standing[worker].resident & ~wanted:
                    self._use_one(worker, "sleep")
                if wanted & ~self._standing[worker].resident:
                    self._use_one(worker, "wake_up", wanted)
        except Exception as second:
            cause.add_note(f"and the others could not be put back ({second}): the run cannot go on")

    def _look(self) -> None:
        self._use_all("stand", deadline=self._deadlines.transition)

    def _use_one(self, worker: int, method: str, *arguments: Any) -> None:
        pending = self._group.start(worker, "use", Part.NONE, method, *arguments)
        self._standing[worker] = pending.result(self._deadlines.transition)

    def _allowed(self) -> Part:
        return self._gate.allowed

    def _use_all(self, method: str, *arguments: Any, deadline: float) -> list[Any]:
        """The value of `method` on every worker."""
        self._standing = self._group.call("use", self._allowed(), method, *arguments, deadline=deadline)
        return [used.value for used in self._standing]

    def _use_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float) -> list[Any]:
        """As `_use_all`, with arguments of its own for each worker."""
        calls = [(self._allowed(), method, *each) for each in arguments]
        self._standing = self._group.call_each("use", calls, deadline=deadline)
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

    def _known(self) -> Part:
        parts = Part.NONE
        for part, size in self._footprints[0].items():
            parts |= part if size else Part.NONE
        return parts
