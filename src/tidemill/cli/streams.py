"""Standard output and error, whose readers may be gone: what is said to nobody must not change how a command ends."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from tidemill.errors import TidemillError

__all__ = ["OutputError", "say", "settle", "silence", "tell", "writing"]


class OutputError(TidemillError):
    """What was asked for could not be written to standard output."""


def tell(text: str) -> None:
    """A line of what was asked for, on standard output, at once; nothing where Python started without one.

    Raises OutputError when it cannot be written, as on a full disk, and BrokenPipeError when nobody reads it.
    """
    with writing(sys.stdout):
        print(text, flush=True)


@contextlib.contextmanager
def writing(stream: TextIO | None) -> Iterator[None]:
    """Inside, only `stream` is written to. Raises as `tell` does, with the stream silenced: there is no second try."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is not None:
            silence(stream)
        raise OutputError(
            f"cannot write to standard output: {error.strerror or error}; make room, or send it elsewhere"
        ) from error


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
