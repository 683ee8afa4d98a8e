"""What an engine has sampled, and the completions that it becomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.contracts.engine import Completion
from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import EngineError

__all__ = ["Answer", "completions"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Ids sampled, the ending one included, and their log-probs in nats."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


def completions(answers: Sequence[Answer], version: PolicyVersion, tokenizer: Any) -> list[Completion]:
    """Each answer with its text: decoded without special tokens, and without the id that ended it, special or not.

    Raises EngineError for log-probs that are not finite: whoever computed them has drawn from no distribution.
    """
    broken = [answer for answer in answers if not all(map(math.isfinite, answer.logprobs))]
    if broken:
        place = next(at for at, value in enumerate(broken[0].logprobs) if not math.isfinite(value))
        raise EngineError(
            f"cannot use {len(broken)} of {len(answers)} answers under version {version}: log-probs in them are not "
            f"finite, the first at token {place}; look for NaN in the weights of the last update"
        )
    return [
        Completion(
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            stop_reason=answer.stop_reason,
            version=version,
            text=_text(answer, tokenizer),
        )
        for answer in answers
    ]


def _text(answer: Answer, tokenizer: Any) -> str:
    ids = answer.token_ids[:-1] if answer.stop_reason == StopReason.EOS else answer.token_ids
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
