"""Refusing what needs memory that is not there."""

from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate
from tidemill.errors import ResidencyError

__all__ = ["check_present", "check_resident"]


def check_present(gate: Gate, resident: Part, part: Part, doing: str) -> None:
    """Raises ResidencyError unless the gate lets `part` in and all of it is `resident`."""
    gate.check(part, doing)
    check_resident(resident, part, doing)


def check_resident(resident: Part, part: Part, doing: str) -> None:
    """Raises ResidencyError unless all of `part` is `resident`. Ask the gate first."""
    absent = part & ~resident
    if absent:
        raise ResidencyError(
            f"engine.{doing} needs {part.words()} on the device and {absent.words()} is asleep; call it inside "
            f"`with residency.awake(engine): ...`"
        )
