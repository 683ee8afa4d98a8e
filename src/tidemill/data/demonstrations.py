"""Prompts with the answers to imitate: what a supervised step learns from."""

from tidemill.contracts.state import Cursor
from tidemill.data.jsonl import JsonlData
from tidemill.data.tokenizer import Tokenizer
from tidemill.errors import DataError

__all__ = ["Demonstrations"]


class Demonstrations:
    """`count` pairs a step, each row's `label` being the answer, encoded once and ended by the end-of-sequence id.

    Raises DataError when a label is not text.
    """

    def __init__(self, data: JsonlData, tokenizer: Tokenizer, count: int) -> None:
        if count < 1:
            raise ValueError(f"a step needs at least one demonstration, not {count}")
        wrong = [prompt.id for prompt in data.all_prompts() if not isinstance(prompt.label, str)]
        if wrong:
            raise DataError(
                f"cannot learn from {data.path}: {len(wrong)} of {len(data)} rows have no text as label, the first is "
                f"{wrong[0]!r}; give each row the answer to imitate as label"
            )
        self._data, self._count = data, count
        self._answers = {prompt.id: tokenizer.encode_completion(prompt.label) for prompt in data.all_prompts()}

    def take(self, cursor: Cursor) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], Cursor]:
        """Pairs (ids of the prompt, ids of the answer) of one step, and the cursor behind them."""
        prompts, behind = self._data.take(cursor, self._count)
        return [(prompt.token_ids, self._answers[prompt.id]) for prompt in prompts], behind
