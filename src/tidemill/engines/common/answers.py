"""What an engine has sampled, and the completions that it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.contracts.engine import Completion
from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion

__all__ = ["Answer", "completions"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Ids sampled, the ending one included, and their log-probs in nats."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


def completions(answers: Sequence[Answer], version: PolicyVersion, tokenizer: Any) -> list[Completion]:
    """Each answer with its text: decoded without special tokens, and without the id that ended it, special or not."""
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
