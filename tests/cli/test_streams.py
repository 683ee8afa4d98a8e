"""Streams whose readers are gone (`tidemill.cli.streams`)."""

import io
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from tidemill.cli.streams import say, settle, silence


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    yield stream
    stream.close()


def test_what_is_said_is_said_at_once() -> None:
    stream = io.StringIO()
    say("done", stream)
    assert stream.getvalue() == "done\n"


def test_nothing_is_said_to_nobody(unread: TextIO) -> None:
    say("done", None)
    say("done", unread)
    say("and once more, for the descriptor leads nowhere now", unread)
    closed = io.StringIO()
    closed.close()
    say("done", closed)


def test_what_is_left_in_a_stream_does_not_fail_at_exit(unread: TextIO) -> None:
    unread.write("left")
    settle(unread)
    unread.flush()
    settle(None)


def test_a_stream_without_a_descriptor_stays_as_it_is() -> None:
    silence(io.StringIO())
