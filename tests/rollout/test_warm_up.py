"""Demonstrations as batches (`tidemill.rollout.warm_up`)."""

from tidemill.contracts.state import Cursor
from tidemill.rollout.warm_up import NoWarmUp, SupervisedWarmUp


class Pairs:
    """Two pairs a step; the cursor counts them."""

    def take(self, cursor: Cursor) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], Cursor]:
        return [((1, 2), (3,)), ((4,), (5, 6))], Cursor(position=cursor.position + 2)


def test_only_completions_are_learned_and_the_cursor_moves_on() -> None:
    warm_up = SupervisedWarmUp(steps=3, demonstrations=Pairs())
    batch, cursor = warm_up.batch(Cursor(position=4))
    assert cursor.position == 6
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, True]
    assert warm_up.loss is not None


def test_without_warm_up_there_is_nothing_to_take() -> None:
    batch, cursor = NoWarmUp().batch(Cursor(position=4))
    assert (NoWarmUp().steps, batch.rows, cursor.position) == (0, 0, 4)
