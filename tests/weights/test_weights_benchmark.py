"""The benchmark of the hand-over of weights runs on a CPU and writes lines that compare (`benchmarks/weights`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.weights.runs import MODES
from benchmarks.weights.sides import Case, Receiver, Source

from tidemill.contracts.events import ignore
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.weights.direct import DirectWeightSync

ROOT = Path(__file__).parents[2]
SHAPE = {"benchmark", "arm", "case", "metric", "value", "unit", "cycle", "verified"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--case", "small", "--carrier", "direct"], ["--shape", "tiny"]])
def test_the_benchmark_writes_verified_lines_and_a_table(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weights", "--device", "cpu", "--cycles", "3", *words, "--json", file],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(set(line) == SHAPE and line["benchmark"] == "weights" and line["verified"] for line in lines)
    found = {(line["arm"], line["metric"], line["cycle"]) for line in lines}
    for carrier in ["direct"] if "direct" in words else ["direct", "host"]:
        for mode in MODES:
            for metric in ("seconds", "rate", "copy_ratio", "verify"):
                assert {(f"{carrier}-{mode}", metric, "first"), (f"{carrier}-{mode}", metric, "median")} <= found
    assert ("checksums", "hash_ratio", "median") in found
    assert "unit" in done.stdout


def test_a_receiver_that_takes_weights_wrongly_is_no_success() -> None:
    case = Case(name="tiny", device="cpu", source="float32", target="bfloat16")
    source, receiver = Source(case), Receiver(case)
    residency = LeaseManager(budget=1 << 40, emit=ignore, deadline=1.0)
    sync = DirectWeightSync(residency=residency, emit=ignore)
    with residency.awake(source):
        sync.update_weights(source, receiver, PolicyVersion(1, 0))
        assert all(torch.equal(receiver.views[name], weight.bfloat16()) for name, weight in source.weights.items())
        del receiver.views["weight.3"]
        with pytest.raises(WeightSyncError, match=r"weight\.3"):
            sync.update_weights(source, receiver, PolicyVersion(1, 1))
    assert receiver.version is None


def test_the_case_of_small_tensors_has_ten_thousand_and_the_shapes_have_their_bytes() -> None:
    small = Case(name="small", device="cpu", source="float32", target="float32")
    assert len(small.shapes()) == 10_000
    bytes_of = {
        name: Case(name=name, device="cuda", source="float32", target="bfloat16").nbytes()
        for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
    }
    assert [round(size / 2e9, 1) for size in bytes_of.values()] == [0.6, 1.7, 4.0, 7.6]
