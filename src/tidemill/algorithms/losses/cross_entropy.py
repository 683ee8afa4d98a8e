"""Cross-entropy with the tokens shown: maximum likelihood."""

from dataclasses import dataclass

from tidemill.algorithms.reduce import token_mean
from tidemill.contracts.algorithm import LossInputs, LossOutput

__all__ = ["CrossEntropyLoss"]


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss:
    """Mean negative log-probability over tokens, in nats. Advantages and old log-probs play no part."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of one micro-batch; it is its own metric."""
        numerator, count = token_mean(-inputs.logprobs, inputs.mask)
        return LossOutput(numerator=numerator, count=count, sums={})
