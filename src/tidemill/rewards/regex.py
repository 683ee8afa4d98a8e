"""The answer is right when what a pattern finds in it is the label.

Some patterns take for ever on some texts, inside one call that nothing can interrupt: so the search runs in a guarded
child process, and such an answer fails within the time limit.
"""

import re
from collections.abc import Sequence

from tidemill.contracts.events import Emit
from tidemill.contracts.sample import Score, Trajectory
from tidemill.errors import ConfigError
from tidemill.rewards.function import FunctionReward

__all__ = ["RegexMatch"]


class RegexMatch:
    """1 where the last match of `pattern`, its first group if it has one, equals the label, else 0.

    White space around both is ignored. Without a label, 1 where the pattern is found at all. The other arguments are
    those of FunctionReward. Raises ConfigError for a pattern that does not compile.
    """

    def __init__(
        self, *, pattern: str, timeout: float, memory: int, workers: int, failure_budget: float, emit: Emit
    ) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"reward.pattern = {pattern!r} is not a regular expression: {error}; mend it") from error
        self._function = FunctionReward(
            use="tidemill.rewards.patterns:last_match_is_label",
            keywords={"pattern": pattern},
            name="regex",
            timeout=timeout,
            memory=memory,
            workers=workers,
            failure_budget=failure_budget,
            emit=emit,
        )

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """1.0 or 0.0 each, or failed. Raises RewardError when more fail than the budget allows."""
        return self._function.score(trajectories)

    def close(self) -> None:
        """End the child processes. May be called twice."""
        self._function.close()
