"""A JSONL sink whose lines are in the files as soon as they are written, for tests that read them at once."""

from tidemill.contracts.events import Event
from tidemill.recorders.jsonl import JsonlSink

__all__ = ["WrittenAtOnce"]


class WrittenAtOnce(JsonlSink):
    """Flushes after each event."""

    def write(self, step: int, event: Event) -> None:
        """Write and flush."""
        super().write(step, event)
        self.flush()
