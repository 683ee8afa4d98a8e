"""A tenant in a worker's process: used under the driver's gate, and telling after each call how it stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill import faults
from tidemill.cluster.whereabouts import Whereabouts, whereabouts
from tidemill.cluster.worker import Failure, failure_of
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Tenant

__all__ = ["Description", "TenantService", "Used"]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What never changes of a worker's tenant: its name, and the bytes of each part when awake."""

    name: str
    footprint: Mapping[Part, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Used:
    """The value of a call, and the tenant's parts on the device and bytes on the host after it.

    A transition that failed is a value too, `failure`: the driver must know of every worker how it stands.
    """

    value: Any
    resident: Part
    host_bytes: int
    failure: Failure | None = None


class TenantService:
    """Wraps one tenant. The methods that `use` may call are those that a subclass defines, and the transitions here."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def describe(self) -> Description:
        """Asked once, when the worker is made."""
        return Description(name=self._tenant.name, footprint={part: self._tenant.footprint(part) for part in Part.ALL})

    def use(self, allowed: Part, method: str, *arguments: Any) -> Used:
        """Call one of this service's methods with the tenant's gate as the driver's is: open for `allowed` only."""
        faults.point(f"worker.{method}")
        gate = self._tenant.gate
        gate.open(allowed)
        try:
            value = getattr(self, method)(*arguments)
        finally:
            gate.close(Part.ALL)
        return self._used(value, None)

    def shift(self, method: str, *arguments: Any) -> Used:
        """Call a transition that needs no other worker. Raises nothing: its failure is told with how things stand."""
        try:
            faults.point(f"worker.{method}")
            value = getattr(self, method)(*arguments)
        except Exception as error:
            return self._used(None, failure_of(error))
        return self._used(value, None)

    def where(self) -> Whereabouts:
        """The machine, and the GPU that this process has used."""
        return whereabouts()

    def stand(self) -> None:
        """Does nothing: `use` tells how things stand."""

    def wake_up(self, part: Part) -> Moved:
        """See Tenant."""
        return self._tenant.wake_up(part)

    def sleep(self) -> Moved:
        """See Tenant."""
        return self._tenant.sleep()

    def _used(self, value: Any, failure: Failure | None) -> Used:
        tenant = self._tenant
        return Used(value=value, resident=tenant.resident(), host_bytes=tenant.host_bytes(), failure=failure)
