"""What every source of prompts must do. Subclass `DataSuite` and give it a source of at least three rows."""

import pytest

from tidemill.contracts.environment import Data
from tidemill.contracts.sample import Prompt
from tidemill.contracts.state import Cursor
from tidemill.errors import DataError

__all__ = ["DataSuite"]


class DataSuite:
    """Override the fixture `data`."""

    @pytest.fixture
    def data(self) -> Data:
        """A source of at least three rows."""
        raise NotImplementedError("override the fixture `data`")

    def test_equal_cursors_give_equal_prompts(self, data: Data) -> None:
        assert data.take(Cursor(), 2) == data.take(Cursor(), 2)

    def test_an_epoch_holds_every_row_once(self, data: Data) -> None:
        prompts, cursor = data.take(Cursor(), len(data))
        following, _ = data.take(cursor, len(data))
        assert len({prompt.id for prompt in prompts}) == len(data)
        assert {prompt.id for prompt in following} == {prompt.id for prompt in prompts}

    def test_keys_are_never_used_twice(self, data: Data) -> None:
        prompts, _ = data.take(Cursor(), 3 * len(data))
        assert len({prompt.key for prompt in prompts}) == 3 * len(data)

    def test_batches_of_any_size_give_one_sequence(self, data: Data) -> None:
        total = 2 * len(data) + 1
        whole, last = data.take(Cursor(), total)
        for size in range(1, len(data) + 2):
            cursor = Cursor()
            joined: list[Prompt] = []
            while len(joined) < total:
                prompts, cursor = data.take(cursor, min(size, total - len(joined)))
                joined += prompts
            assert joined == whole
            assert cursor == last

    def test_every_prompt_holds_tokens(self, data: Data) -> None:
        prompts, _ = data.take(Cursor(), len(data))
        assert all(prompt.token_ids for prompt in prompts)

    def test_a_cursor_that_fits_is_not_rebased(self, data: Data) -> None:
        _, cursor = data.take(Cursor(), len(data) + 2)
        for fitting in (Cursor(), cursor):
            assert data.rebase(fitting) == fitting

    def test_a_cursor_of_other_data_is_rebased_to_the_start_of_the_next_epoch(self, data: Data) -> None:
        _, cursor = data.take(Cursor(), len(data) + 2)
        for other in (
            Cursor(epoch=cursor.epoch, position=cursor.position, digest="0" * 32),
            Cursor(epoch=cursor.epoch, position=len(data) + 5, digest=cursor.digest),
        ):
            fitting = data.rebase(other)
            assert (fitting.epoch, fitting.position) == (cursor.epoch + 1, 0)
            data.take(fitting, 1)

    def test_a_cursor_of_other_data_is_refused(self, data: Data) -> None:
        _, cursor = data.take(Cursor(), 2)
        with pytest.raises(DataError):
            data.take(Cursor(epoch=cursor.epoch, position=cursor.position, digest="0" * 32), 1)
        with pytest.raises(DataError):
            data.take(Cursor(epoch=0, position=len(data) + 1, digest=cursor.digest), 1)
