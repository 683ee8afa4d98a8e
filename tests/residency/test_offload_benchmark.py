"""The benchmark of sleep and wake runs on a CPU and writes lines that can be compared (`benchmarks/offload.py`)."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload.py"


def test_the_benchmark_writes_verified_lines_and_a_table(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--gib", "0.01", "--small-gib", "0.005", "--json", file],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["case"] for line in lines} == {"large", "small-10000"}
    assert {"sleep_ratio", "wake_ratio"} <= {line["metric"] for line in lines}
    assert all(line["benchmark"] == "offload" and line["verified"] for line in lines)
    assert "of plain copy" in done.stdout.splitlines()[-1] or "GB/s" in done.stdout.splitlines()[-1]
