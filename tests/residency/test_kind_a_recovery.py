"""Fault A18 of kind A: a recovery that fails half-way opens nothing, and the next start recovers from the beginning."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.residency.real_run import Watching, prepare_learning, real_parts, saved_weights

from tidemill.errors import TidemillError
from tidemill.loops import sync
from tidemill.testing.fakes.parts import Watched

STEPS = 4
SHORT = (f"steps={STEPS}", "warm_up.steps=1", "checkpoint.every=1", "residency.offload=always", "eval.every=0")


class BrokenStepError(RuntimeError):
    """One step of the recovery does not work, this time."""


class StoppedError(RuntimeError):
    """How a start ended, after which calls."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(calls)
        self.calls = calls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run that nothing happened to."""
    base = prepare_learning(tmp_path_factory.mktemp("whole"))
    with real_parts(base, Watching(), *SHORT) as parts:
        sync.run(parts, steps=STEPS)
    return saved_weights(base, STEPS)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after two steps, with a checkpoint of each."""
    base = prepare_learning(tmp_path_factory.mktemp("stopped"))
    with real_parts(base, Watching(), *SHORT) as parts:
        sync.run(parts, steps=2)
    return base


RECOVERY = {
    *("restore", "load", "start", "snapshot", "begin", "sleep", "wake_up"),
    *("update_weights", "named_weights", "begin_update", "load_weights", "weight_checksums", "publish"),
}


class Place:
    """Stands before a cluster, and lets `watch` hear of each call of its trainer and engine."""

    def __init__(self, cluster: Any, watch: Callable[[str], None]) -> None:
        self.cluster, self.watch = cluster, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def trainer(self, build: Any, *, ranks: int) -> Any:
        return Watched(self.cluster.trainer(build, ranks=ranks), self.watch)

    def engine(self, build: Any, *, replicas: int) -> Any:
        return Watched(self.cluster.engine(build, replicas=replicas), self.watch)


def next_start(base: Path, at: Callable[[int], None], *, steps: int = STEPS) -> list[str]:
    """Run on; all calls of recovery and those of `generate`, before and after; `at` hears the number of each."""
    calls: list[str] = []
    begun: list[bool] = []

    def watch(call: str) -> None:
        if begun and call.rpartition(".")[2] in RECOVERY | {"generate"}:
            calls.append(call)
            at(len(calls) - 1)

    def place(cluster: Any) -> Any:
        return Place(cluster, watch)

    with real_parts(base, Watching(done=STEPS), *SHORT, place=place) as parts:
        begun.append(True)
        outer: dict[str, Any] = {
            name: Watched(getattr(parts, name), watch) for name in ("weights", "checkpointer", "recorder")
        }
        try:
            sync.run(replace(parts, **outer), steps=steps)
        except (BrokenStepError, TidemillError) as error:
            raise StoppedError(calls) from error
    return calls


def generated(calls: list[str]) -> list[str]:
    return [call for call in calls if call.endswith(".generate")]


def copied(base: Path, to: Path) -> Path:
    shutil.copytree(base, to)
    return to


def test_a18_whichever_step_of_a_recovery_fails_nothing_is_generated_and_the_next_start_is_as_if_none_had(
    stopped: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A18: the run ends with the error; admission opens when all steps are done, and then the result is the same."""
    listed = next_start(copied(stopped, tmp_path / "listed"), lambda number: None, steps=3)
    recovery = listed[: listed.index(generated(listed)[0])]
    assert {call.rpartition(".")[2] for call in recovery} == RECOVERY
    broken = copied(stopped, tmp_path / "broken")
    for number, call in enumerate(recovery):

        def at(found: int, number: int = number, call: str = call) -> None:
            if found == number:
                raise BrokenStepError(call)

        with pytest.raises(StoppedError) as caught:
            next_start(broken, at)
        causes = repr([caught.value.__cause__, caught.value.__cause__ and caught.value.__cause__.__cause__])
        assert "BrokenStepError" in causes and call in causes, call
        assert generated(caught.value.calls) == [], f"something was generated after {call} failed"
    assert generated(next_start(broken, lambda number: None))
    assert saved_weights(broken, STEPS) == whole
