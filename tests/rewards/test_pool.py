import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tidemill.errors import PluginError, RewardError
from tidemill.rewards.pool import Pool
from tidemill.rewards.worker import Worker

OURS = Path(__file__).with_name("reward_functions.py")


@pytest.fixture
def pool():
    made = Pool(use=f"{OURS}:processes", keywords={}, memory=1 << 28, workers=2)
    yield made
    made.close()


def test_a_process_that_died_while_idle_is_replaced_without_blame(pool):
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not pool.pids)
    assert pool.submit([], 5).result() == {"entries": [], "printed": ""}
    assert len(pool.pids) == 1
    assert pool.pids != (pid,)


def test_no_more_processes_live_than_were_asked_for(pool):
    for future in [pool.submit([], 5) for _ in range(20)]:
        assert future.result()["entries"] == []
    assert 1 <= len(pool.pids) <= 2


def test_a_function_that_cannot_be_loaded_leaves_no_process():
    with pytest.raises(PluginError, match="no_such_module"):
        Pool(use="no_such_module:f", keywords={}, memory=1 << 28, workers=1)


@pytest.fixture
def hanging(tmp_path):
    """A pool whose process has died, and whose function's module hangs when it is imported again."""
    module = tmp_path / "slow_rewards.py"
    module.write_text("def score(answers):\n    return [0.0] * len(answers)\n")
    made = Pool(use=f"{module}:score", keywords={}, memory=1 << 28, workers=2)
    module.write_text("import time\ntime.sleep(600)\n")
    os.kill(made.pids[0], signal.SIGKILL)
    wait_until(lambda: not made.pids)
    yield made
    made.close()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_ends_a_process_whose_module_hangs_on_import_at_once(hanging):
    future = hanging.submit([], 5)
    wait_until(lambda: hanging.pids)
    begun = time.monotonic()
    hanging.close()
    assert time.monotonic() - begun < 3
    assert isinstance(future.exception(timeout=1), PluginError)


def test_closing_ends_a_process_that_is_just_being_started_too(hanging, monkeypatch):
    """The process is there, and the pool does not know it yet."""
    started = threading.Event()

    def start_slowly():
        worker = Worker()
        started.set()
        time.sleep(0.5)
        return worker

    monkeypatch.setattr("tidemill.rewards.pool.Worker", start_slowly)
    future = hanging.submit([], 5)
    assert started.wait(10)
    begun = time.monotonic()
    hanging.close()
    assert time.monotonic() - begun < 3
    assert isinstance(future.exception(timeout=1), PluginError)


def test_a_process_that_the_machine_refuses_is_an_error_that_says_what_to_do(monkeypatch):
    def refuse():
        raise OSError("too many processes")

    monkeypatch.setattr("tidemill.rewards.pool.Worker", refuse)
    with pytest.raises(RewardError, match=r"too many processes; .* lower reward.workers"):
        Pool(use=f"{OURS}:processes", keywords={}, memory=1 << 28, workers=1)
