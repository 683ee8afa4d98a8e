"""A run keeps its plan, and holds what it planned: `plan.json` beside `metrics.jsonl`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.app.run import planned
from tidemill.cli.main import main
from tidemill.config.load import load


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("planned")
    prepare(base)
    assert main(["run", str(recipe(base, base / "run")), "steps=6", "--quiet"]) == 0
    return base / "run"


def test_what_each_tenant_held_at_its_peak_is_within_a_tenth_of_the_plan(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timings = [line for line in lines if line["kind"] == "timing"]
    for tenant in ("trainer", "engine"):
        for where in ("device", "host"):
            held = max(line.get(f"memory/{where}/{tenant}", 0.0) for line in timings)
            assert held == pytest.approx(plan["tenants"][tenant][where], rel=0.1), (tenant, where)
    assert plan["offload"]["turns"] is True


def test_the_page_of_the_run_shows_both(run: Path) -> None:
    section = re.search(r'<section id="plan">.*?</section>', (run / "report.html").read_text(), re.S)
    assert section
    assert section[0].count("<tr><td>") == 4
    assert "offload is always" in section[0]


def test_a_run_that_nobody_can_plan_for_runs_without_a_plan(run: Path) -> None:
    word = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"
    config: Any = load([run.parent / "run.toml"], [word], check_files=False).config
    assert planned(config, "cpu") == {}
