"""A console for those who want no progress: what needs attention, and nothing else."""

from collections.abc import Mapping
from typing import Any, TextIO

from tidemill.contracts.events import CheckpointEvent, Event, Notice
from tidemill.recorders.sentences import checkpoint_line
from tidemill.recorders.text import visible

__all__ = ["AttentionSink"]


class AttentionSink:
    """Implements `Sink`: warnings, and saves that failed, a line each, without control codes."""

    name = "attention"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, step: int, event: Event) -> None:
        """Show it, or not."""
        match event:
            case Notice(level="warning"):
                self._print(event.text)
            case CheckpointEvent(status="failed"):
                self._print(checkpoint_line(event))

    def flush(self) -> None:
        """Nothing is kept back."""

    def end_step(self, step: int) -> None:
        """A step that went well needs no attention."""

    def state(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Nothing that was shown can be taken back."""

    def close(self) -> None:
        """The stream is somebody else's."""

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        line = visible(f"warning: {text}").encode(encoding, "backslashreplace").decode(encoding)
        self._stream.write(line + "\n")
        self._stream.flush()
