import os
import signal
import time
from pathlib import Path

import pytest

from tidemill.errors import PluginError
from tidemill.rewards.pool import Pool

OURS = Path(__file__).with_name("reward_functions.py")


@pytest.fixture
def pool():
    made = Pool(use=f"{OURS}:processes", keywords={}, memory=1 << 28, workers=2)
    yield made
    made.close()


def test_a_process_that_died_while_idle_is_replaced_without_blame(pool):
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while pool.pids and time.monotonic() < deadline:
        time.sleep(0.01)
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
