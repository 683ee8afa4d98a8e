"""W&B offline: no account, no network. What it wrote is read back by its own reader of its own files."""

import importlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill.contracts.events import Evaluated, Metrics
from tidemill.errors import PluginError
from tidemill.recorders.wandb import WandbSink
from tidemill.testing.suites.recorder import SinkSuite

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this account has configured is out of reach."""
    for name, folder in (("WANDB_CONFIG_DIR", "config"), ("WANDB_CACHE_DIR", "cache"), ("WANDB_DATA_DIR", "data")):
        monkeypatch.setenv(name, str(tmp_path / "home" / folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def make(run: Path) -> WandbSink:
    return WandbSink(folder=run, mode="offline", title="a title", settings={"steps": 10})


class TestWandbSink(SinkSuite):
    def make(self, run: Path) -> WandbSink:
        return make(run)


def records(data: bytes) -> Iterator[bytes]:
    """Records of a file of W&B: 7 bytes, then blocks of 32 KiB; kind 1 is whole, 2 first, 3 middle, 4 last."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def rows(run: Path) -> Iterator[dict[str, Any]]:
    """History rows of all starts, in order."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                yield {name: json.loads(value) for name, value in items.items()}


def test_one_run_id_over_crash_and_resume_and_repeated_steps_are_marked(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.resume(0, {})
    state: Any = None
    for step in range(5):
        first.write(step, Metrics(values={"reward/mean": 0.5, "policy/loss": float("nan")}))
        first.end_step(step)
        if step == 2:
            state = json.loads(json.dumps(dict(first.state())))
    first.close()
    second = make(tmp_path)
    second.resume(3, state)
    second.write(3, Evaluated(values={"eval/reward": 0.75}))
    assert second.state() == state
    second.close()
    names = [path.name for path in tmp_path.glob("wandb/offline-run-*")]
    assert len(names) == 2 and all(f"-{state['id']}" in name for name in names)
    # Offline, the process of W&B may still be writing when the run is finished.
    deadline = time.monotonic() + 20
    while len(found := list(rows(tmp_path))) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [(row["step"], row["start"]) for row in found] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (3, 2)]
    assert found[0]["reward/mean"] == 0.5 and "policy/loss" not in found[0]


def test_a_start_that_died_before_its_first_checkpoint_keeps_its_id(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.resume(0, {})
    known = first.state()
    first.close()
    second = make(tmp_path)
    second.resume(0, {})
    assert second.state() == known
    second.close()


def test_it_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = make(tmp_path)
    sink.resume(0, {})
    sink.write(0, Metrics(values={"reward/mean": 0.5}))
    sink.close()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_nothing_about_the_machine_is_kept(tmp_path: Path) -> None:
    sink = make(tmp_path)
    sink.resume(0, {})
    sink.close()
    names = {path.name for path in tmp_path.rglob("wandb/offline-run-*/files/*")}
    assert not names & {"wandb-metadata.json", "requirements.txt", "diff.patch"}


def test_a_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(PluginError, match=r"pip install 'tidemill\[wandb\]'"):
        make(tmp_path)
