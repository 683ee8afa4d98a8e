"""What a loop does with Ctrl-C and SIGTERM: save the state between two steps, then stop."""

import contextlib
from collections.abc import Iterator

from tidemill.contracts.parts import Parts
from tidemill.contracts.state import RunState
from tidemill.errors import Interrupted

__all__ = ["saved_when_interrupted"]


@contextlib.contextmanager
def saved_when_interrupted(parts: Parts, state: RunState) -> Iterator[None]:
    """When Interrupted leaves the block, `state` is saved and durable first.

    Sound because signals raise only inside `stop.at_once()` and `stop.check()`, where the trainer holds `state`.
    """
    try:
        yield
    except Interrupted:
        parts.checkpointer.save(state)
        parts.checkpointer.drain()
        raise
