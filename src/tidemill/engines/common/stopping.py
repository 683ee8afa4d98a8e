"""When an answer ends: the ids that end it, and stop strings found as tokens arrive."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.data.tokenizer_folder import stored_end_ids
from tidemill.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64
    from torch import Tensor

__all__ = ["NEVER", "NoStopStrings", "StopStrings", "end_ids"]

NEVER = np.iinfo(np.int64).max

# A tail that starts inside a character, or at a space that some tokenizers drop, must do so before the stop string.
_MARGIN = 4


def end_ids(folder: Path, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Every id that ends an answer, ascending. Raises DataError for what is no id of this model."""
    found = stored_end_ids(folder, tokenizer)
    outside = [token for token in found if token >= vocabulary]
    if outside:
        raise DataError(
            f"cannot use {folder}: its end-of-sequence id {outside[0]} is outside the vocabulary of {vocabulary} ids; "
            f"config.json, generation_config.json and tokenizer must belong together"
        )
    return found


class NoStopStrings:
    """Stands in where no stop strings were asked for, and costs nothing."""

    def __init__(self, *, rows: int) -> None:
        self.lengths = np.full(rows, NEVER)

    def watch(
        self, index: "Int64[Tensor, ' B']", tokens: "Int64[Tensor, ' B']", alive: "Bool[Tensor, ' B']", length: int
    ) -> None:
        """Does nothing."""


class StopStrings:
    """Watches the answers of one batch for stop strings. `lengths` holds where each answer ended so, or `NEVER`.

    Looks at the decoded tail of each answer: enough tokens to hold the longest stop string at one byte a token, special
    tokens not counted. A character whose bytes come in several tokens is found when its last byte is there.
    """

    def __init__(self, *, stop: Sequence[str], tokenizer: Any, rows: int) -> None:
        self.lengths = np.full(rows, NEVER)
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(text.encode()) for text in stop) + _MARGIN
        self._tails: list[list[int]] = [[] for _ in range(rows)]

    def watch(
        self, index: "Int64[Tensor, ' B']", tokens: "Int64[Tensor, ' B']", alive: "Bool[Tensor, ' B']", length: int
    ) -> None:
        """Clear `alive` in place where the new token, the answer's number `length`, completes a stop string.

        `index` maps the rows of this call to those of the batch.
        """
        living = alive.nonzero()[:, 0]
        rows = index[living].tolist()
        ended = [self.completes(row, token) for row, token in zip(rows, tokens[living].tolist(), strict=True)]
        self.lengths[[row for row, end in zip(rows, ended, strict=True) if end]] = length
        alive[living] = ~torch.tensor(ended, dtype=torch.bool, device=alive.device)

    def completes(self, row: int, token: int) -> bool:
        """Whether `token`, the next one of answer `row`, is the one with which a stop string is complete."""
        if token in self._special:
            return False
        tail = self._tails[row]
        tail.append(token)
        del tail[: -self._window]
        text = self._tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)
