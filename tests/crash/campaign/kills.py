"""One kill of a run: where, whom, and whether the power goes with it."""

from collections.abc import Callable
from dataclasses import dataclass

Dice = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """`at` is `point` (the `nth` pass of `name`, which begins with its process), `operation` (before the `nth` one on
    the disk, in whichever process) or `moment` (`seconds` after the start).

    `whom` is `it` (the process that is there; at a moment the driver), `rank` (at a moment, a worker), or `all`. With
    `power` everything dies and the disk loses what it may of what was not synced. With `damage` the newest checkpoint
    is broken afterwards, if there is an older one.
    """

    at: str = "never"
    name: str = ""
    nth: int = 0
    seconds: float = 0.0
    whom: str = "it"
    power: bool = False
    damage: bool = False

    @property
    def words(self) -> str:
        """For a table and for messages."""
        where = {"point": f"{self.name}@{self.nth}", "operation": f"operation {self.nth}"}
        text = where.get(self.at, f"{self.seconds:.3f} s" if self.at == "moment" else "never")
        return text + " ".join(["", self.whom, *["power cut"] * self.power, *["damage"] * self.damage])

    @property
    def kind(self) -> str:
        """The row of a table that it counts in."""
        return {"point": "named point", "operation": "disk operation", "moment": "random time"}.get(self.at, "never")


NEVER = Kill()
