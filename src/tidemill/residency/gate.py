"""The door of a tenant: open while somebody holds a lease, checked by every method that touches the device."""

import threading

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError

__all__ = ["TenantGate"]


class TenantGate:
    """Knows which parts of one tenant may be used now; who may, and how often, is the lease manager's business."""

    def __init__(self, tenant_name: str) -> None:
        self._tenant = tenant_name
        self._allowed = Part.NONE
        self._lock = threading.Lock()

    @property
    def allowed(self) -> Part:
        """The parts that may be used now."""
        return self._allowed

    def open(self, part: Part) -> None:
        """Allow the use of `part` from now on, besides what is allowed already."""
        with self._lock:
            self._allowed |= part

    def close(self, part: Part) -> None:
        """Forbid the use of `part` from now on."""
        with self._lock:
            self._allowed &= ~part

    def check(self, part: Part, doing: str) -> None:
        """Raises ResidencyError unless every part in `part` is allowed. `doing` is the method's name, as in `step`.

        It raises before any memory is touched: on a CPU the touch of a released storage ends the process.
        """
        missing = part & ~self._allowed
        if missing:
            raise ResidencyError(
                f"{self._tenant}.{doing} needs a lease of {self._tenant} ({part.words()}) and {missing.words()} is not "
                f"leased, so its memory may be gone; call it inside `with residency.awake({self._tenant}): ...`"
            )
