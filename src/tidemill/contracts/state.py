"""How far a run is: the small frozen value that is saved whole with the trainer and restored whole."""

from dataclasses import dataclass, replace
from typing import Any, Self

__all__ = ["Cursor", "PolicyVersion", "RunState"]


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Which weights: ordered by attempt, then step. Each start of a run raises the attempt: versions never go back."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.step} (attempt {self.attempt})"


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position in the data: `position` rows of the order of `epoch` are consumed.

    `digest` is a hash over the ids of these rows in order; the data checks it on resume, so that a changed file is
    noticed rather than read at the wrong place.
    """

    epoch: int = 0
    position: int = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State between two steps: `step` updates are done, `cursor` has exactly their prompts behind it."""

    step: int
    attempt: int
    seed: int
    cursor: Cursor
    warm_up_cursor: Cursor

    @property
    def policy_version(self) -> PolicyVersion:
        """The version of the weights in this state."""
        return PolicyVersion(self.attempt, self.step)

    def advance(self, *, cursor: Cursor | None = None, warm_up_cursor: Cursor | None = None) -> Self:
        """The state one update later, with the cursor of the data that the update consumed."""
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor or self.cursor,
            warm_up_cursor=warm_up_cursor or self.warm_up_cursor,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` gives the equal state back."""
        return {
            "step": self.step,
            "attempt": self.attempt,
            "seed": self.seed,
            "cursor": vars(self.cursor),
            "warm_up_cursor": vars(self.warm_up_cursor),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
        for name in ("step", "attempt", "seed"):
            _check_count(name, data[name])
        return cls(
            step=data["step"],
            attempt=data["attempt"],
            seed=data["seed"],
            cursor=_cursor(data["cursor"]),
            warm_up_cursor=_cursor(data["warm_up_cursor"]),
        )


def _cursor(data: dict[str, Any]) -> Cursor:
    cursor = Cursor(**data)
    _check_count("epoch", cursor.epoch)
    _check_count("position", cursor.position)
    if not isinstance(cursor.digest, str):
        raise ValueError(f"digest cannot be {cursor.digest!r}")
    return cursor


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} cannot be {value!r}")
