"""A reward written by hand: 1 when the last number in the answer is the label, else 0.

A reward function takes a list of answers and returns as many numbers. It runs in a process of its own, under time and
memory limits; `answer.text` is what the model wrote, `answer.label` what the data says is right, a number here.
"""

import re
from collections.abc import Sequence

from tidemill.rewards.answer import Answer

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in the text: `1,200` is 1200, `$5.` is 5; None when there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def score(answers: Sequence[Answer]) -> list[float]:
    """1.0 for a right answer, 0.0 for another."""
    return [float(last_number(answer.text) == answer.label) for answer in answers]
