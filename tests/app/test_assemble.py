"""Budgets as the settings stand for them (`tidemill.app.assemble`); whole runs are in test_whole_run.py."""

import contextlib
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.app import assemble, build
from tidemill.app.run_folder import RunFolder
from tidemill.cluster.inline import InlineCluster
from tidemill.config.load import load
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Event, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.workers import BuildEngine, BuildTrainer, Place
from tidemill.errors import Terminated
from tidemill.testing.fakes.device import FakeTenant

SIZES = {Part.WEIGHTS: 100, Part.OPTIMIZER: 200, Part.GRADS: 100}


def test_gradients_that_are_not_allocated_yet_do_not_count_as_memory_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    loaded = load([recipe(tmp_path, tmp_path / "run")], ["residency.offload=auto"])
    trainer: Any = FakeTenant("trainer", SIZES, keeps=Part.ALL)
    trainer.wake_up(Part.ALL)
    engine: Any = FakeTenant("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 900}, keeps=Part.NONE)
    seen: dict[str, int] = {}

    def budget_for(mode: str, **sizes: int) -> tuple[int, str]:
        seen.update(sizes)
        return 10_000, "enough"

    monkeypatch.setattr(assemble, "budget_for", budget_for)
    cluster: Any = SimpleNamespace(
        shares_devices=True, device="cpu", free_bytes=lambda: 5_000, park_groups=lambda parks: None
    )
    events: list[Event] = []
    assemble.leases(loaded.config, cluster, trainer=trainer, engine=engine, emit=events.append)
    assert seen["device_bytes"] == 5_000 + 100 + 200
    assert seen["trainer_bytes"] == 400
    assert Notice(text="enough") in events


@pytest.mark.parametrize(("device", "said"), [("cuda", "have GPUs of their own"), ("cpu", "take no turns on a CPU")])
def test_trainer_and_engine_that_are_placed_apart_both_stay_awake(tmp_path: Path, device: str, said: str) -> None:
    prepare(tmp_path)
    loaded = load([recipe(tmp_path, tmp_path / "run")], ["residency.offload=auto"])
    trainer: Any = FakeTenant("trainer", SIZES, keeps=Part.ALL)
    engine: Any = FakeTenant("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 900}, keeps=Part.NONE)
    cluster: Any = SimpleNamespace(shares_devices=False, device=device)
    events: list[Event] = []
    manager = assemble.leases(loaded.config, cluster, trainer=trainer, engine=engine, emit=events.append)
    assert events == [Notice(text=f"trainer and engine {said}: both stay awake")]
    with manager.awake(trainer):
        pass
    with manager.awake(engine):
        pass
    assert manager.transitions() == {"trainer": (0, 1), "engine": (0, 1)}


class Stop:
    """Implements `StopSignal`: a signal has arrived when `looks` have been taken."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def at_once(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def check(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise Terminated("stopped by SIGTERM")


@pytest.mark.parametrize(("looks", "built"), [(0, []), (1, ["engine"]), (2, ["engine", "trainer"])])
def test_a_signal_that_comes_while_parts_are_built_ends_the_run_before_the_next_one(
    tmp_path: Path, looks: int, built: list[str]
) -> None:
    prepare(tmp_path)
    loaded = load([recipe(tmp_path, tmp_path / "run")], [])
    made: list[str] = []

    class Cluster(InlineCluster):
        def trainer(self, build: BuildTrainer, *, ranks: int) -> Trainer:
            made.append("trainer")
            return super().trainer(build, ranks=ranks)

        def engine(self, build: BuildEngine, *, replicas: int) -> RolloutEngine:
            made.append("engine")
            return super().engine(build, replicas=replicas)

    recorder: Any = SimpleNamespace(emit=lambda event: None)
    cluster = Cluster(device="cpu", emit=recorder.emit)
    folder = RunFolder(loaded.config.run.dir)
    with (
        pytest.raises(Terminated, match="SIGTERM"),
        assemble.assembled(loaded, cluster, folder=folder, attempt=1, recorder=recorder, stop=Stop(looks)),
    ):
        raise AssertionError("all was built")
    assert made == built


def test_a_rank_stops_waiting_for_others_in_time_to_tell_the_driver_who_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    config = load([recipe(tmp_path, tmp_path / "run")], ["residency.deadline=10"]).config
    monkeypatch.setattr(build, "implementation", lambda settings: SimpleNamespace)
    made: Any = build.build_trainer(config, Place(), lambda event: None)
    assert 5 < made.deadline <= 8


def test_what_a_run_keeps_is_not_looked_through_by_the_collector_until_it_ends(tmp_path: Path) -> None:
    prepare(tmp_path)
    loaded = load([recipe(tmp_path, tmp_path / "run")], [])
    recorder: Any = SimpleNamespace(emit=lambda event: None, name="recorder")
    folder = RunFolder(loaded.config.run.dir)
    before = gc.get_freeze_count()
    cluster = InlineCluster(device="cpu", emit=recorder.emit)
    with assemble.assembled(loaded, cluster, folder=folder, attempt=1, recorder=recorder, stop=Stop(99)):
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0
