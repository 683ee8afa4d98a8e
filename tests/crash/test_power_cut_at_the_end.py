"""The power is cut after a run has ended well: what it said at last is not said again, so that it has to be durable."""

import shutil
from pathlib import Path

from tests.crash.campaign.disk_left import Replay
from tests.crash.campaign.scenarios import SCENARIOS, unkilled
from tests.crash.small_run import outcome, prepare, start


def test_a_run_that_ended_keeps_its_last_evaluation_whatever_a_power_cut_takes(tmp_path: Path) -> None:
    prepare(tmp_path)
    run = tmp_path / "run"
    inside = unkilled(SCENARIOS[0], tmp_path, run, traced=True)
    wanted = outcome(run)
    assert wanted.metrics[-1]["kind"] == "eval"
    Replay(inside.notes / "trace").leave(tmp_path / "left", lambda options: 0)
    shutil.rmtree(run)
    (tmp_path / "left").rename(run)
    process = start(SCENARIOS[0].words(tmp_path, run), tmp_path / "again.log")
    process.join(120)
    assert process.exitcode == 0 and "nothing to do" in (tmp_path / "again.log").read_text()
    assert outcome(run) == wanted
