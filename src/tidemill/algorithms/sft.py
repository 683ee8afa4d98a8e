"""Supervised training on demonstrations: the warm-up before reinforcement learning."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.algorithms.pack import Row, pack
from tidemill.contracts.batch import Batch

__all__ = ["Sft"]


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Cross-entropy on completions; prompts are read, not learned."""

    @property
    def loss(self) -> CrossEntropyLoss:
        """Mean negative log-probability of completion tokens."""
        return CrossEntropyLoss()

    def batch(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        """Pairs of prompt and completion ids, in order, at temperature 1. Nothing was sampled: log-probs are all 0."""
        rows = [
            Row(
                prompt_ids=prompt,
                answer_ids=completion,
                logprobs=[0.0] * len(completion),
                mask=[True] * len(completion),
            )
            for prompt, completion in pairs
        ]
        return pack(rows, temperature=1.0, metrics={})
