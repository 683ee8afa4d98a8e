import io
from pathlib import Path

import pytest

from tidemill.contracts.events import CheckpointEvent, Evaluated, Metrics, Notice, Progress
from tidemill.recorders.bars import Bars, NoBars
from tidemill.recorders.fanout import Fanout
from tidemill.recorders.rich import RichSink
from tidemill.testing.suites.recorder import HOSTILE, SinkSuite, every_event


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Ascii(io.TextIOWrapper):
    """A stream that can write ASCII only, as under LANG=C."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("ascii")


class TestRichSink(SinkSuite):
    def make(self, run: Path) -> RichSink:
        return RichSink(steps=10, warm_up_steps=2, stream=io.StringIO())


class TestRichSinkOnATerminal(SinkSuite):
    def make(self, run: Path) -> RichSink:
        return RichSink(steps=10, warm_up_steps=2, stream=Terminal())


def drive(sink: RichSink, steps: range, seconds: float = 0.11) -> None:
    for step in steps:
        values = {"policy/loss": 0.012, "policy/kl": 0.0, "batch/tokens": 132}
        reward = {"reward/mean": 0.71, "reward/scored": 1.0, "rollout/tokens_mean": 9.0} if step >= 2 else {}
        sink.write(step, Metrics(values=values | reward))
        sink.write(step, Metrics(values={"time/step": seconds}))
        sink.end_step(step)


def test_each_step_is_one_plain_line_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = RichSink(steps=4, warm_up_steps=2, stream=stream, pause=0.0)
    sink.resume(0, {})
    drive(sink, range(4))
    sink.close()
    assert stream.getvalue().splitlines() == [
        "warm-up 1/2  loss 0.012  tokens 1.2k/s  0.11 s",
        "warm-up 2/2  loss 0.012  tokens 1.2k/s  0.11 s",
        "step 3/4  reward 0.71  answer tokens 9  tokens 1.2k/s  0.11 s",
        "step 4/4  reward 0.71  answer tokens 9  tokens 1.2k/s  0.11 s",
    ]


def test_quick_steps_do_not_flood_but_news_are_never_left_out() -> None:
    stream = io.StringIO()
    now = [0.0]
    sink = RichSink(steps=100, warm_up_steps=0, stream=stream, pause=0.5, clock=lambda: now[0])
    sink.resume(0, {})
    for step in range(100):
        if step == 42:
            sink.write(step, CheckpointEvent(time=0.0, status="durable", step=40, path="p"))
        drive(sink, range(step, step + 1))
        now[0] += 0.01
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 5
    assert lines[0].startswith("step 1/100") and lines[-1].startswith("step 100/100")
    assert sum(line.endswith("checkpoint 40 durable") for line in lines) == 1


def test_an_evaluation_compares_with_the_last_one_over_a_restart() -> None:
    stream = io.StringIO()
    sink = RichSink(steps=9, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    sink.write(0, Evaluated(values={"eval/exact_match": 0.61}))
    again = RichSink(steps=9, warm_up_steps=0, stream=stream)
    again.resume(5, sink.state())
    again.write(5, Evaluated(values={"eval/exact_match": 0.84}))
    assert stream.getvalue().splitlines() == [
        "eval at step 0: exact match 0.61",
        "going on at step 5",
        "eval at step 5: exact match 0.84 (was 0.61)",
    ]


def test_warnings_and_failed_saves_are_shown_at_once() -> None:
    stream = io.StringIO()
    sink = RichSink(steps=9, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    sink.write(0, Notice(text="3 rows were skipped", level="warning"))
    sink.write(0, CheckpointEvent(time=0.0, status="failed", step=2, path="p", reason="no space left"))
    assert stream.getvalue().splitlines() == [
        "warning: 3 rows were skipped",
        "warning: checkpoint 2 failed: no space left",
    ]


def test_a_checkpoint_that_became_durable_after_the_last_step_is_still_told() -> None:
    stream = io.StringIO()
    sink = RichSink(steps=1, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    drive(sink, range(1))
    sink.write(1, CheckpointEvent(time=0.0, status="durable", step=1, path="p"))
    sink.close()
    assert stream.getvalue().splitlines()[-1] == "checkpoint 1 durable"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_text_of_others_moves_no_cursor_and_is_not_markup(stream: io.StringIO) -> None:
    sink = RichSink(steps=9, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    for event in every_event(HOSTILE):
        sink.write(0, event)
    sink.close()
    shown = stream.getvalue()
    assert "[bold]markup[/bold]" in shown
    assert not set(shown) & {"\x07", "\x00", "\u202e", "\ud83d"}
    assert "\x1b[31m" not in shown
    if not stream.isatty():
        assert "\x1b" not in shown and "\r" not in shown


def test_a_stream_that_knows_only_ascii_gets_escapes() -> None:
    stream = Ascii()
    sink = RichSink(steps=9, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    sink.write(0, Notice(text="naïve 日本"))
    assert stream.text() == "na\\xefve \\u65e5\\u672c\n"


def test_a_terminal_shows_bars_and_is_left_clean() -> None:
    stream = Terminal()
    bars = Bars(stream)
    bars.show("rollout", 1, 4)
    bars.print("a line", "")
    bars.show("rollout", 4, 4)
    bars.show("saving", 0, 0)
    bars.close()
    bars.close()
    text = stream.getvalue()
    assert "rollout" in text and "a line" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor must come back"


def test_progress_is_not_written_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = RichSink(steps=9, warm_up_steps=0, stream=stream)
    sink.resume(0, {})
    sink.write(0, Progress(what="rollout", done=1, total=4))
    NoBars(stream).close()
    assert stream.getvalue() == ""


class Gone(Terminal):
    """A terminal whose other end is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("event", [Notice(text="hello"), Progress(what="answers", done=1, total=2)])
def test_a_terminal_that_is_gone_costs_the_run_its_console_and_no_more(event: Notice | Progress) -> None:
    recorder = Fanout(sinks=[], live=[RichSink(steps=10, warm_up_steps=2, stream=Gone())])
    recorder.start(0)
    recorder.emit(event)
    recorder.emit(Notice(text="and on"))
    recorder.close()


def test_a_bar_shows_the_true_total_from_its_first_moment() -> None:
    terminal = Terminal()
    sink = RichSink(steps=4, warm_up_steps=0, stream=terminal)
    sink.resume(0, {})
    sink.write(0, Progress(what="rollout", done=0, total=64))
    sink.close()
    assert "0/64" in terminal.getvalue()
    assert "100" not in terminal.getvalue()
