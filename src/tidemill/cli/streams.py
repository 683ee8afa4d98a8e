"""Standard output and error, whose readers may be gone: what is said to nobody must not change how a command ends."""

import contextlib
import os
from typing import TextIO

__all__ = ["say", "settle", "silence"]


def say(text: str, stream: TextIO | None) -> None:
    """A line on `stream`, at once; nothing when it is None, as Python has it when it started without that stream.

    When nobody reads it any more, it is silenced: what ends well without being read ends well.
    """
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        silence(stream)


def settle(stream: TextIO | None) -> None:
    """Flush what is left in `stream`, so that Python's own flush at exit finds nothing to fail on."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        silence(stream)


def silence(stream: TextIO) -> None:
    """Point the descriptor of `stream` at nothing, for good; a stream without one stays as it is."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, stream.fileno())
        finally:
            os.close(nothing)
