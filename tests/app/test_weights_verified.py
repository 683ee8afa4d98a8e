"""What `weights.verify` does to a run: nothing but what it records (`tidemill.app.build.weight_samples`)."""

import json
from pathlib import Path

import pytest
from tests.crash.small_run import checksums, prepare, recipe

from tidemill.cli.main import main


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    prepare(folder)
    return folder


def test_a_run_records_what_it_compared_and_ends_the_same_however_much_that_is(base: Path) -> None:
    ends, shares = [], {}
    for verify in ("always", "sampled", "off"):
        folder = base / verify
        words = [f'weights.verify="{verify}"', "weights.verify_within=2"]
        assert main(["run", str(recipe(base, folder)), "--quiet", *words]) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        timings = [line for line in lines if line["kind"] == "timing" and "weights/verified" in line]
        assert all(0 < line["time/verify"] < line["time/update_weights"] for line in timings)
        shares[verify] = {round(line["weights/verified"], 1) for line in timings}
        ends.append(checksums(folder))
    assert shares["always"] == {1.0}
    assert shares["off"] == {0.0}
    assert max(shares["sampled"]) <= 0.6
    assert ends[0] == ends[1] == ends[2]
