"""What an answer is worth."""

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from tidemill.config.base import Plug
from tidemill.config.kinds import Count, Fraction, Label, Seconds, Size, absolute, folder_of, refuse
from tidemill.units import GIB

__all__ = ["ExactMatchSettings", "FunctionRewardSettings", "GuardedRewardSettings", "RegexSettings", "RewardSettings"]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(f"is not a regular expression: {error}") from error
    return pattern


def _function(use: object, info: ValidationInfo) -> object:
    """The file of `path/to/file.py:function` made absolute; `module:function` as it stands. Neither is imported."""
    if not isinstance(use, str):
        return use
    place, _, name = use.rpartition(":")
    if not place or not name.isidentifier():
        raise refuse("should be module:function or path/to/file.py:function")
    return f"{absolute(place, folder_of(info))}:{name}" if place.endswith(".py") else use


class RewardSettings(Plug):
    """What every reward has."""

    use: Annotated[str, Field(min_length=1)] = "exact_match"
    """Which reward: `exact_match`, `regex`, an entry point in `tidemill.rewards`, or your own Python function as
    `module:function` or `path/to/file.py:function`."""


class GuardedRewardSettings(RewardSettings):
    """Rewards that run in child processes under limits: a bad one costs a score, not the run."""

    timeout: Seconds = 10.0
    """Longest time for one call of the reward before its process is ended and the answers count as failed."""
    memory: Size = 2 * GIB
    """Memory that one reward process may take before it is ended."""
    workers: Count = 1
    """Reward processes."""
    failure_budget: Fraction = 0.1
    """Part of a step's answers whose score may fail before the run stops."""


class ExactMatchSettings(RewardSettings):
    """1 where the answer is the row's label, or one of its labels, else 0."""

    implementation: ClassVar[str] = "tidemill.rewards.exact:ExactMatch"

    strip: bool = True
    """Ignore white space around the answer and around the label."""


class RegexSettings(GuardedRewardSettings):
    """1 where the pattern's last match in the answer, or its first group, is the label, else 0."""

    implementation: ClassVar[str] = "tidemill.rewards.regex:RegexMatch"

    use: Annotated[str, Field(min_length=1)] = "regex"
    """The reward by regular expression."""
    pattern: Annotated[str, AfterValidator(_compiles), Label("regular expression", text=True), Field(min_length=1)]
    """Regular expression whose last match, or its first group, is compared with the row's label. Needed for `regex`."""


class FunctionRewardSettings(GuardedRewardSettings):
    """A Python function of yours: it takes a list of trajectories and returns a list of scores."""

    implementation: ClassVar[str] = "tidemill.rewards.function:FunctionReward"

    use: Annotated[str, BeforeValidator(_function), Field(min_length=1)]
    """`module:function` or `path/to/file.py:function`; looked up in the reward's own process only."""
