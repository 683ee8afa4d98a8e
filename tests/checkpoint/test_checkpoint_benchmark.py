"""The benchmark of saves runs on a CPU and writes lines that can be compared (`benchmarks/checkpoint`)."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.checkpoint.arms import ARMS, Tidemill, TorchSave, arms_on
from benchmarks.checkpoint.cycles import Found, Loop, Window
from benchmarks.checkpoint.disk import Raw, folder_bytes, make_durable
from benchmarks.checkpoint.house import House
from benchmarks.checkpoint.runs import Round, figures_of, run_arm
from benchmarks.offload import cases
from benchmarks.offload.cases import Case

from tidemill.contracts.events import Event, Progress
from tidemill.units import MIB

ROOT = Path(__file__).parents[2]
SHAPE = {"benchmark", "arm", "case", "metric", "value", "unit", "cycle", "verified"}
TINY = ["--device", "cpu", "--gib", "0.01", "--shape", "tiny"]


class Forgetful(TorchSave):
    """Loads, and changes nothing."""

    def load(self) -> None:
        """As if it had."""


class Dying(TorchSave):
    """Ends the process, as a disk that is full may."""

    def save(self) -> None:
        """Never returns."""
        raise SystemExit(3)


def case(name: str) -> Case:
    return Case(name=name, size=1 << 20, shape="tiny", device="cpu")


def found(*, half: float, reported: float) -> Found:
    """Cycles of two seconds, a save that costs half a second; rollouts of half the length cost `half`."""
    usual = {"wake": 0.5, "train": 0.5, "sleep": 0.5, "rollout": 0.5}
    return Found(
        bytes=100 * MIB,
        files=100 * MIB,
        prepare=0.0,
        plain=[usual, usual, usual],
        windows={
            "half": Window(cycles=[usual, usual | {"sleep": 0.5 + half}], durable=4.0, reported=reported),
            "full": Window(cycles=[usual | {"call": 0.5}, usual], durable=2.0, reported=0.0),
        },
        commit=1.25,
        load=2.0,
        put=0.5,
        host_peak=110.0 * MIB,
        copies=[0.25],
        writes=[1.0],
        reads=[1.5, 1.0],
        direct=True,
        verified=True,
    )


@pytest.mark.slow
def test_the_benchmark_of_saves_writes_verified_lines_a_table_and_a_picture(tmp_path: Path) -> None:
    file, picture = tmp_path / "lines.jsonl", tmp_path / "picture.svg"
    arms = ("tidemill-asleep", "dcp-async", "safetensors")
    words = [*TINY, *(word for arm in arms for word in ("--arm", arm)), "--case", "large", "--case", "export"]
    words += ["--folder", tmp_path, "--json", file, "--plot", picture]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(set(line) == SHAPE and line["benchmark"] == "checkpoint" and line["verified"] for line in lines)
    values = {(line["case"], line["arm"], line["metric"]): line["value"] for line in lines}
    for arm in arms:
        assert values["large", arm, "durable_ratio"] > 0 and values["large", arm, "load_ratio"] > 0
        assert values["large", arm, "files"] == pytest.approx(1, abs=0.01)
        assert ("large", arm, "stall") in values
    assert ("large", "tidemill-asleep", "reported_half") in values
    assert ("large", "safetensors", "stall_half") not in values
    assert values["export", "tidemill-asleep", "written"] == 1
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "unit" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {file.name, picture.name}


@pytest.mark.parametrize(
    ("kind", "name", "verified"),
    [
        (ARMS["tidemill-awake"], "small", [True]),
        (ARMS["dcp"], "large", [True]),
        (ARMS["dcp-async"], "small", [True]),
        (Forgetful, "large", [False]),
        (Dying, "large", []),
    ],
)
def test_a_save_that_is_not_loaded_as_it_was_is_reported_as_failing(
    kind: type[TorchSave],
    name: str,
    verified: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Forked, so that the children know an arm that no module has.
    monkeypatch.setitem(ARMS, "other", kind)
    monkeypatch.setattr(cases, "_SMALL_TENSORS", 300)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = run_arm(multiprocessing.get_context("fork"), "other", case(name), tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert [each.found.verified for each in rounds] == verified
    figures = figures_of("large", "other", rounds, "cpu")
    assert figures and all(figure.verified == (verified == [True]) for figure in figures)
    assert bool(rounds) or "SystemExit: 3" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class SlowDisk(Tidemill):
    """Its writer needs a second for 64 MiB."""

    def _note(self, event: Event) -> None:
        super()._note(event)
        time.sleep(0.2 if isinstance(event, Progress) else 0.0)


def test_a_sleep_that_meets_the_writer_loses_time_and_says_how_much(tmp_path: Path) -> None:
    house = House(Case(name="large", size=64 * MIB, shape="tiny", device="cpu"))
    loop = Loop(house, SlowDisk(house, tmp_path), torch.device("cpu"), asleep=True)
    plain = loop.plain(6)[1:]  # the first one is slower than others
    window = loop.window(0.0)
    house.close()
    assert window.durable > 0.8
    assert window.reported > 0.3
    assert window.lost("sleep", plain) > 0.8 * window.reported
    assert window.stall(plain) > 0.5 * window.reported


def test_a_stall_is_what_cycles_with_a_save_take_more_than_as_many_without() -> None:
    rounds = [Round(found(half=half, reported=half), host=0.0) for half in (1.0, 3.0, 2.0)]
    values = {figure.metric: figure.value for figure in figures_of("large", "tidemill-asleep", rounds, "cpu")}
    assert values["stall"] == values["lost_call"] == pytest.approx(0.5)
    assert values["stall_ratio"] == pytest.approx(2.0)
    assert values["stall_half"] == values["lost_sleep_half"] == values["reported_half"] == pytest.approx(2.0)
    assert values["durable_ratio"] == pytest.approx(0.5)
    assert values["commit_ratio"] == pytest.approx(0.8)
    assert values["load_ratio"] == pytest.approx(0.5)
    assert values["host_peak"] == pytest.approx(1.1)


def test_on_a_gpu_what_the_host_had_less_counts_where_it_is_more() -> None:
    figures = figures_of("large", "dcp", [Round(found(half=0.0, reported=0.0), host=210.0 * MIB)], "cuda")
    values = {figure.metric: figure for figure in figures}
    assert values["host_peak"].value == pytest.approx(2.1)
    assert values["stall_ratio"].unit == "of pinned copy"
    assert "reported" not in values and "commit_ratio" not in values


@pytest.mark.parametrize(("version", "there"), [("2.11.0+cu130", False), ("2.13.0", True)])
def test_the_pinned_stager_is_left_out_with_a_word_where_it_works_once(
    version: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    arms, why = arms_on("cuda")
    assert ("dcp-async-pinned" in arms) == there
    assert ("works once" in why) != there
    assert "needs a GPU" in arms_on("cpu")[1]


@pytest.mark.parametrize("refused", [False, True])
def test_the_limit_writes_and_reads_as_many_bytes_and_leaves_nothing(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_direct(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    if refused:
        monkeypatch.setattr(os, "open", without_direct)
    raw = Raw(tmp_path)
    assert not (refused and raw.direct)
    assert raw.write(20 * MIB + 17) > 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(9 * MIB + 17))
    make_durable(tmp_path)
    assert folder_bytes(tmp_path) == 9 * MIB + 17
    assert raw.read(tmp_path, direct=True) > 0 and raw.read(tmp_path, direct=False) > 0
