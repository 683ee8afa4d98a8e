"""The benchmark of parking runs on a CPU and writes lines that can be compared (`benchmarks/park.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_of_parking_writes_verified_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks.park", "--device", "cpu", "--cycles", "2", "--json", file]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(line["metric"], line["cycle"]): line["value"] for line in lines}
    assert all(line["benchmark"] == "park" and line["verified"] for line in lines)
    assert {"destroy", "revive", "first_collective", "device_freed", "step"} <= {metric for metric, _ in found}
    assert found["groups_parked", "last"] == 0
    assert found["threads", "first"] == found["threads", "last"]
