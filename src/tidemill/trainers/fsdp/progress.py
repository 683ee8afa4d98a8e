"""How far a trainer is within its phase: the part of its state that is not tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tidemill.errors import CheckpointError
from tidemill.trainers.common.schedule import PhaseSettings

__all__ = ["Progress"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`updates` counts calls of `step` in the phase, skipped ones too: the learning rate follows it.

    `optimizer_steps` counts updates applied. `phase` is "" before the first.
    """

    phase: str = ""
    updates: int = 0
    optimizer_steps: int = 0

    def advance(self, *, optimizer_steps: int) -> Self:
        """One `step` later."""
        return replace(self, updates=self.updates + 1, optimizer_steps=optimizer_steps)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` gives the equal value back."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; other keys are left alone. Raises CheckpointError when one is missing or impossible."""
        found: dict[str, Any] = {name: data.get(name) for name in ("phase", "updates", "optimizer_steps")}
        counts = [found["updates"], found["optimizer_steps"]]
        if not isinstance(found["phase"], str) or not all(type(count) is int and count >= 0 for count in counts):
            raise CheckpointError(
                f"cannot load the trainer: its saved counts are {found}, where a phase and two numbers from 0 up were "
                "written; use an older checkpoint"
            )
        return cls(**found)

    def with_fresh_moments(self) -> Self:
        """As far as before, with no update behind the moments."""
        return replace(self, optimizer_steps=0)

    def total_steps(self, phases: Mapping[str, PhaseSettings]) -> int:
        """Of the phase, by its settings; 0 before the first."""
        return phases[self.phase].total_steps if self.phase else 0

    def check_phase(self, known: Iterable[str]) -> None:
        """Raises CheckpointError when it was saved in a phase that is not among `known`."""
        if self.phase and self.phase not in (names := sorted(known)):
            raise CheckpointError(
                f"cannot load the trainer: it was saved in phase {self.phase!r}, and there are settings for "
                f"{', '.join(names)} only; keep that phase in the settings"
            )

    def new_curve(self, total_steps: int, before: object) -> str:
        """What to say when the learning rate falls until another step than `before`; nothing otherwise."""
        if not self.phase or before == total_steps:
            return ""
        return (
            f"the learning rate now falls until step {total_steps} of phase {self.phase}, no longer until {before}: "
            f"the new curve holds from step {self.updates} on"
        )
