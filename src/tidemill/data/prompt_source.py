"""The data at the number of prompts that a step takes."""

from collections.abc import Sequence

from tidemill.contracts.environment import Data
from tidemill.contracts.sample import Prompt
from tidemill.contracts.state import Cursor

__all__ = ["PromptsPerStep"]


class PromptsPerStep:
    """`count` prompts a step; a step may reach over the end of an epoch, so that none is dropped."""

    def __init__(self, data: Data, count: int) -> None:
        if count < 1:
            raise ValueError(f"a step needs at least one prompt, not {count}")
        self._data, self._count = data, count

    def take(self, cursor: Cursor) -> tuple[Sequence[Prompt], Cursor]:
        """The prompts of one step, and the cursor behind them."""
        return self._data.take(cursor, self._count)
