"""A sample of `make crash`: real runs of one and of two ranks, killed anywhere, with power cuts, end as if unkilled."""

import os
from pathlib import Path

import pytest

from tests.crash.campaign.campaign import Campaign, references
from tests.crash.campaign.scenarios import SCENARIOS

KILLS = int(os.environ.get("TIDEMILL_TEST_KILLS", "30"))
SECONDS = 60.0
SAMPLE = [SCENARIOS[0], SCENARIOS[1], SCENARIOS[4], SCENARIOS[5]]


@pytest.mark.slow
def test_a_sample_of_kills_tears_nothing_loses_nothing_and_changes_nothing(tmp_path: Path) -> None:
    base = tmp_path / "a sample ü"
    base.mkdir()
    tally = Campaign(base, references(base, SAMPLE), seed=1, wanted=KILLS, seconds=SECONDS).run(jobs=2)
    assert tally.sound, "\n".join(tally.lines())
    figures = tally.to_json(seconds=0.0, seed=1)
    assert figures["torn"] == figures["acknowledged_lost"] == figures["mixed"] == figures["failed"] == 0
    assert figures["resumes_equal"] == figures["runs"] > 0
