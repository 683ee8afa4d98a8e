"""Token ids that a model has no word for are refused before any rank is called with them."""

from tidemill.contracts.batch import Batch
from tidemill.errors import TrainerError

__all__ = ["check_token_ids"]


def check_token_ids(batch: Batch, *, vocabulary: int) -> None:
    """Raises TrainerError unless every id is from 0 up to `vocabulary`, exclusively."""
    if batch.tokens and not 0 <= batch.token_ids.min() <= batch.token_ids.max() < vocabulary:
        raise TrainerError(
            f"cannot use a batch with token ids from {batch.token_ids.min()} to {batch.token_ids.max()}: the model "
            f"has {vocabulary} words, so they come from another tokenizer; check `model` and the data"
        )
