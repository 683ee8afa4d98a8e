"""The answer is right when it is the label, letter for letter."""

from collections.abc import Sequence

from tidemill.contracts.sample import Score, Trajectory
from tidemill.errors import RewardError
from tidemill.rewards.labels import accepted

__all__ = ["ExactMatch"]


class ExactMatch:
    """1 where the answer equals the label, or one of a list of labels, else 0. `strip` ignores white space around."""

    def __init__(self, *, strip: bool = True) -> None:
        self._strip = strip

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """1.0 or 0.0 each. Raises RewardError for a row without label."""
        return [Score(value=float(self._is_right(trajectory))) for trajectory in trajectories]

    def close(self) -> None:
        """Nothing to end."""

    def _is_right(self, trajectory: Trajectory) -> bool:
        labels = accepted(trajectory.prompt.label)
        if not labels:
            raise RewardError(
                f"exact_match cannot score {trajectory.id}: row {trajectory.prompt.id!r} has no label; "
                "give every row a label, or set reward.use to a function of yours"
            )
        return self._form(trajectory.text) in {self._form(label) for label in labels}

    def _form(self, text: str) -> str:
        return text.strip() if self._strip else text
