"""The search behind `reward.use = "regex"`, as a reward function; standard library only, run in the reward process."""

import re

from tidemill.rewards.answer import Answer
from tidemill.rewards.labels import accepted

__all__ = ["last_match_is_label"]


def last_match_is_label(answers: list[Answer], *, pattern: str) -> list[float]:
    """1.0 where the last match (its first group, if there is one) is the label; where found at all, without label."""
    compiled = re.compile(pattern)
    return [float(_is_right(answer, compiled)) for answer in answers]


def _is_right(answer: Answer, pattern: re.Pattern[str]) -> bool:
    matches = list(pattern.finditer(answer.text))
    if not matches:
        return False
    if answer.label is None:
        return True
    text = matches[-1][1 if pattern.groups else 0]
    return text is not None and text.strip() in {label.strip() for label in accepted(answer.label)}
