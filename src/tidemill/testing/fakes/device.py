"""A device for fakes: memory that is really gone while its owner sleeps, so that a touch is an exception."""

import numpy as np

from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.errors import ResidencyError

__all__ = ["Array", "FakeGate", "FakeTenant"]

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class FakeGate:
    """The simplest gate that keeps its contract."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.allowed = Part.NONE

    def open(self, part: Part) -> None:
        """Allow `part`."""
        self.allowed |= part

    def close(self, part: Part) -> None:
        """Forbid `part`."""
        self.allowed &= ~part

    def check(self, part: Part, doing: str) -> None:
        """Raises ResidencyError when something in `part` is not allowed."""
        if part not in self.allowed:
            raise ResidencyError(f"{self.tenant} cannot {doing} without a lease for {part.words()}")


class FakeTenant:
    """Holds arrays by part; sleeping moves them to the host or drops them, and the device side is deleted."""

    def __init__(self, name: str, sizes: dict[Part, int], *, keeps: Part) -> None:
        self.name = name
        self.gate = FakeGate(name)
        self.sizes = sizes
        self.keeps = keeps
        self.device: dict[str, Array] = {}
        self.host: dict[str, Array] = {}
        self.awake = Part.NONE
        self.moves: list[str] = []

    def resident(self) -> Part:
        """Parts awake now."""
        return self.awake

    def footprint(self, part: Part) -> int:
        """Sum of the sizes of the parts named."""
        return sum(size for mine, size in self.sizes.items() if mine in part)

    def host_bytes(self) -> int:
        """Bytes of the host copies."""
        return sum(array.nbytes for array in self.host.values())

    def wake_up(self, part: Part) -> Moved:
        """Bring parts back; the arrays come with the weights."""
        wanted = Part.NONE
        for mine in self.sizes:
            if mine in part:
                wanted |= mine
        if wanted in self.awake:
            return Moved()
        self.moves.append(f"wake_up {(wanted & ~self.awake).words()}")
        if Part.WEIGHTS in wanted and Part.WEIGHTS not in self.awake:
            self.device = {name: array.copy() for name, array in self.host.items()}
        self.awake |= wanted
        return Moved(copied=sum(array.nbytes for array in self.device.values()))

    def sleep(self) -> Moved:
        """Copy what is kept to the host, then delete the device side."""
        if self.awake == Part.NONE:
            return Moved()
        self.moves.append("sleep")
        self.host = {name: array.copy() for name, array in self.device.items()} if self.keeps else {}
        self.device = {}
        self.awake = Part.NONE
        return Moved(copied=sum(array.nbytes for array in self.host.values()))

    def on_device(self, name: str) -> Array:
        """An array on the device. Raises ResidencyError when its storage is gone."""
        if name not in self.device:
            raise ResidencyError(f"{self.name}: touched {name}, whose memory was released")
        return self.device[name]
