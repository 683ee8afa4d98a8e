"""Signals, in a process of their own (`tidemill.app.signals`)."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tidemill.app.signals import Signals
from tidemill.errors import Interrupted, Terminated

PROGRAM = """
import sys, time
from tidemill.app.signals import Signals
from tidemill.errors import Interrupted
with Signals() as stop:
    print("ready", flush=True)
    try:
        if sys.argv[1] == "generating":
            with stop.at_once():
                time.sleep(30)
        else:
            for _ in range(300):
                time.sleep(0.01)
            print("update done", flush=True)
            stop.check()
    except Interrupted as error:
        print("saved", flush=True)
        sys.exit(error.exit_code)
"""


def start(where: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_generating_stops_at_once_and_saves(number: signal.Signals, code: int) -> None:
    child = start("generating")
    began = time.monotonic()
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert (out, child.returncode) == ("saved\n", code)
    assert time.monotonic() - began < 10
    assert "again: end at once" in err


def test_a_signal_while_training_waits_for_the_update() -> None:
    child = start("training")
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=20)
    assert out == "update done\nsaved\n"
    assert child.returncode == 143


def test_a_second_signal_ends_at_once() -> None:
    child = start("training")
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None
    assert "SIGINT" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)
    assert out == ""
    assert child.returncode == 130


@pytest.mark.parametrize("stderr", ["its reader is gone", "closed", "never there"])
def test_a_signal_saves_though_nobody_can_be_told(stderr: str) -> None:
    before = {"its reader is gone": "", "closed": "sys.stderr.close()\n", "never there": "sys.stderr = None\n"}
    program = PROGRAM.replace("with Signals()", before[stderr] + "with Signals()")
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.Popen(
        [sys.executable, "-c", program, "generating"], stdout=subprocess.PIPE, stderr=writing, text=True
    )
    os.close(writing)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=20)
    assert (out, child.returncode) == ("saved\n", 143)


def test_a_second_signal_ends_at_once_though_nobody_can_be_told() -> None:
    child = start("training")
    assert child.stderr is not None
    child.stderr.close()
    child.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 143
    assert child.stdout is not None
    assert child.stdout.read() == ""


class Late(Signals):
    """A signal arrives as soon as it has been looked for."""

    def check(self) -> None:
        super().check()
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    sent = False


def test_a_signal_between_the_look_and_the_block_does_not_wait_for_the_block() -> None:
    reached = False
    with Late() as stop, pytest.raises(Terminated), stop.at_once():
        reached = True
    assert not reached


def test_after_a_block_that_a_signal_ended_the_next_one_raises_only_where_it_is_asked_for() -> None:
    with Signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Terminated), stop.at_once():
            raise AssertionError("not reached")
        assert not stop._raising


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Signals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_exit_codes_follow_the_shell() -> None:
    assert (Interrupted("x").exit_code, Terminated("x").exit_code) == (130, 143)
