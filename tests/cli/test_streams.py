"""Streams whose readers are gone (`tidemill.cli.streams`)."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tidemill.cli.streams import OutputError, say, settle, silence, tell, writing


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


def test_what_was_asked_for_and_cannot_be_written_is_an_error_and_the_stream_is_silenced() -> None:
    with Path("/dev/full").open("w") as full:
        with pytest.raises(OutputError, match="standard output: No space left on device; make room"), writing(full):
            print("asked", file=full, flush=True)
        print("more", file=full, flush=True)


def test_a_reader_that_went_away_is_told_from_a_full_disk(unread: TextIO) -> None:
    with pytest.raises(BrokenPipeError), writing(unread):
        unread.write("asked")
        unread.flush()
    silence(unread)


def test_what_is_told_goes_to_standard_output_if_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("asked")
    assert capsys.readouterr().out == "asked\n"
    monkeypatch.setattr(sys, "stdout", None)
    tell("asked")


def test_a_stream_without_a_descriptor_stays_as_it_is() -> None:
    silence(io.StringIO())
