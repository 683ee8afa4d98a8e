"""The benchmark of sleep and wake runs on a CPU and writes lines that can be compared (`benchmarks/offload`)."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.figures import Figure, report
from benchmarks.offload.arms import ARMS, PerTensor
from benchmarks.offload.cases import Case, fingerprint, make
from benchmarks.offload.runs import NoOnlooker, figures_of, run_arm

ROOT = Path(__file__).parents[2]
SHAPE = {"benchmark", "arm", "case", "metric", "value", "unit", "cycle", "verified"}
TINY = ["--device", "cpu", "--gib", "0.01", "--small-gib", "0.005", "--shape", "tiny", "--cycles", "3", "--rounds", "1"]


class Forgetful(PerTensor):
    """Wakes with contents of the first sleep, for ever."""

    def wake(self) -> None:
        self.first = [*self.hosts] if not hasattr(self, "first") else self.first
        self.hosts = [*self.first]
        super().wake()


class Dying(PerTensor):
    """Ends the process, as some memory savers do."""

    def sleep(self, cycle: int) -> None:
        raise SystemExit(3)


def case(name: str) -> Case:
    return Case(name=name, size=1 << 20, shape="tiny", device="cpu")


@pytest.mark.slow
def test_the_benchmark_writes_verified_lines_a_table_and_a_picture(tmp_path: Path) -> None:
    file, picture = tmp_path / "lines.jsonl", tmp_path / "picture.svg"
    words = [*TINY, "--json", file, "--plot", picture]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(set(line) == SHAPE and line["benchmark"] == "offload" and line["verified"] for line in lines)
    assert {"large", "small", "flat", "fsdp"} <= {line["case"] for line in lines}
    assert {"tidemill", "per-tensor-cpu", "pinned-copy"} == {line["arm"] for line in lines}
    found = {(line["arm"], line["case"], line["metric"], line["cycle"]) for line in lines}
    for cycle in ("first", "median"):
        for metric in ("sleep_ratio", "wake_ratio", "sleep", "wake"):
            assert ("tidemill", "fsdp", metric, cycle) in found
    assert all(line["value"] == 0 for line in lines if line["metric"] == "kept" and line["arm"] == "tidemill")
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "unit" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_what_an_arm_leaves_on_a_gpu_is_seen_from_outside(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "lines.jsonl"
    words = [
        "--device",
        "cuda",
        "--case",
        "large",
        "--gib",
        "0.5",
        "--cycles",
        "3",
        "--rounds",
        "1",
        "--arm",
        "tidemill",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload", *words, "--json", file],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = {line["metric"]: line["value"] for line in map(json.loads, file.read_text().splitlines())}
    assert 0.1 < found["context"] < 1.5
    assert found["left"] < 0.0625 and found["kept"] == 0


@pytest.mark.parametrize("name", ["large", "small", "flat", "fsdp"])
def test_a_case_has_the_bytes_that_were_asked_for_each_once(name: str) -> None:
    memory = make(case(name))
    storages = {tensor.untyped_storage().data_ptr() for tensor in memory.tensors}
    assert len(storages) == len(memory.tensors)
    if name != "fsdp":
        assert memory.bytes == pytest.approx(1 << 20, rel=0.01)
    assert memory.views_are_views()
    before = fingerprint(memory.tensors)
    memory.tensors[-1].view(torch.uint8)[-1] ^= 1
    assert fingerprint(memory.tensors) != before


@pytest.mark.parametrize(("kind", "verified"), [(PerTensor, [True]), (Forgetful, [False]), (Dying, [])])
def test_an_arm_that_loses_contents_or_its_process_is_reported_as_failing(
    kind: type[PerTensor], verified: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Forked, so that the children know an arm that no module has.
    monkeypatch.setitem(ARMS, "other", kind)
    context = multiprocessing.get_context("fork")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = run_arm(context, [NoOnlooker()], "other", (case("large"), "", ""), cycles=3)
    finally:
        torch.set_num_threads(threads)
    assert [each.found.verified for each in rounds] == verified
    figures = figures_of("large", "other", rounds, "cpu")
    assert figures and all(figure.verified == (verified == [True]) for figure in figures)
    assert bool(rounds) or "SystemExit: 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_hand_over_keeps_every_bit_and_grows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    words = ["--device", "cpu", "--shape", "tiny", "--cycles", "4", "--json", file]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.handover", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(set(line) == SHAPE and line["benchmark"] == "handover" and line["verified"] for line in lines)
    found = {(line["metric"], line["cycle"]): line["value"] for line in lines}
    assert {("whole_ratio", "first"), ("whole", "median"), ("trainer.sleep", "first")} <= set(found)
    assert all(found[f"{name}_growth", "median"] <= 0 for name in ("pages", "threads", "files"))


def test_what_could_not_be_measured_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = Figure(
        benchmark="b", arm="a", case="c", metric="m", value=float("nan"), unit="u", cycle="first", verified=False
    )
    report([figure], tmp_path / "lines")
    assert json.loads((tmp_path / "lines").read_text())["value"] is None
    assert "FAILED" in capsys.readouterr().out
