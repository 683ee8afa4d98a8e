"""How far a trainer is within its phase: the part of its state that is not tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tidemill.errors import CheckpointError

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
