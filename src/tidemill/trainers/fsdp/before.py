"""Log-probs under the weights before an update, collected on the device and read once at its end."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tidemill.trainers.common.padding import PaddedRows

__all__ = ["BeforeUpdate"]


class BeforeUpdate:
    """Takes the log-probs of one rank's minibatches, in order."""

    def __init__(self) -> None:
        self._logprobs: list[Tensor] = []
        self._positions: list[np.ndarray] = []
        self._tokens = 0

    def add(self, parts: Sequence[PaddedRows], logprobs: Sequence[Float[Tensor, " M"]], *, tokens: int) -> None:
        """Those of the micro-batches of the next minibatch, which has `tokens` tokens."""
        self._logprobs += logprobs
        self._positions += [self._tokens + part.trained_positions for part in parts]
        self._tokens += tokens

    def taken(self) -> Float32[np.ndarray, " N"]:
        """Nats, of the minibatches laid end to end; 0 where nothing was trained on. Waits for the device."""
        found = np.zeros(self._tokens, np.float32)
        if self._logprobs:
            found[np.concatenate(self._positions)] = torch.cat(self._logprobs).cpu().numpy()
        return found
