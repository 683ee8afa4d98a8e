import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidemill.contracts.events import Evaluated, Metrics
from tidemill.errors import PluginError
from tidemill.recorders.tensorboard import TensorboardSink
from tidemill.testing.suites.recorder import SinkSuite

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


class TestTensorboardSink(SinkSuite):
    def make(self, run: Path) -> TensorboardSink:
        return TensorboardSink(folder=run / "tensorboard")


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard itself would draw."""
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def drive(folder: Path, steps: range, value: float, *, close: bool = True) -> TensorboardSink:
    sink = TensorboardSink(folder=folder)
    sink.resume(steps.start, {})
    for step in steps:
        sink.write(step, Metrics(values={"reward/mean": value, "policy/loss": float("nan")}))
        sink.write(step, Evaluated(values={"eval/reward": value}))
        sink.end_step(step)
        sink.state()
    if close:
        sink.close()
    return sink


def test_a_resumed_run_is_one_curve_without_a_double_or_missing_point(tmp_path: Path) -> None:
    drive(tmp_path, range(6), 1.0)
    drive(tmp_path, range(4, 8), 2.0)
    expected = [(step, 1.0 if step < 4 else 2.0) for step in range(8)]
    assert curve(tmp_path, "reward/mean") == expected
    assert curve(tmp_path, "eval/reward") == expected


def test_starts_under_a_clock_that_goes_back_are_one_curve_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [(range(4), 1.0), (range(2, 5), 2.0), (range(4, 6), 3.0), (range(5, 8), 4.0)]
    for back, (steps, value) in enumerate(starts):
        monkeypatch.setattr(time, "time", lambda back=back: 1.7e9 - 86400 * back)
        drive(tmp_path, steps, value)
    assert curve(tmp_path, "reward/mean") == list(enumerate([1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0]))


def test_a_fresh_start_forgets_what_lay_there(tmp_path: Path) -> None:
    drive(tmp_path, range(3), 1.0)
    drive(tmp_path, range(2), 2.0)
    assert curve(tmp_path, "reward/mean") == [(0, 2.0), (1, 2.0)]


def test_what_a_checkpoint_counts_on_is_readable_without_closing(tmp_path: Path) -> None:
    sink = drive(tmp_path, range(3), 1.0, close=False)
    assert len(curve(tmp_path, "reward/mean")) == 3
    sink.close()


def test_a_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(PluginError, match=r"pip install 'tidemill\[tensorboard\]'"):
        TensorboardSink(folder=tmp_path)


def test_naming_the_module_does_not_load_the_library() -> None:
    code = (
        "import sys, tidemill.recorders.tensorboard, tidemill.recorders.wandb\n"
        "print('torch' in sys.modules, 'wandb' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
