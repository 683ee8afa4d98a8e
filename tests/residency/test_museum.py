"""The fault with which this project began, as a museum piece: a save that runs after the trainer has gone to sleep.

First as it is written where sleep is a call among others, on the saver alone; then the same program through leases,
where it does not get past the line that is wrong, and the save that needs no line at all.
"""

import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.residency.real_run import Watching, prepare_learning, real_parts, saved_weights, weights_now

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.errors import ResidencyError, WeightSyncError
from tidemill.loops import sync

NAIVE = Path(__file__).with_name("naive_save.py")
SHORT = ("steps=3", "warm_up.steps=1", "checkpoint.every=1")


def naive(how: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(NAIVE), how, str(file)], capture_output=True, text=True, timeout=120)


def test_the_naive_save_copies_released_memory_and_the_process_dies_without_a_word(tmp_path: Path) -> None:
    done = naive("copy", tmp_path / "saved")
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr == ""
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("how", ["copy", "numpy", "safetensors", "torch-save"])
def test_the_naive_save_saves_the_weights_in_no_way_and_in_some_it_says_that_it_did(how: str, tmp_path: Path) -> None:
    done = naive(how, tmp_path / "saved")
    right = (tmp_path / "saved.right").read_bytes()
    assert len(right) == 100 * 100 * 4
    assert done.returncode == {"copy": -signal.SIGSEGV, "safetensors": 1}.get(how, 0), done.stderr
    if (tmp_path / "saved").exists():
        assert right not in (tmp_path / "saved").read_bytes()


# The same program with Tidemill


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return prepare_learning(tmp_path)


def asleep(parts: Parts) -> bool:
    return parts.trainer.footprint(parts.trainer.resident()) == 0


def refused_here(call: Callable[[], object], line: str) -> None:
    """The call raises, and its traceback leads from that line of this file straight into the gate."""
    with pytest.raises(ResidencyError, match=r"needs a lease of trainer .*with residency\.awake\(trainer\)") as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    mine = [frame for frame in frames if frame.filename == __file__]
    assert mine[-1].line == line
    beyond = frames[frames.index(mine[-1]) + 1 :]
    assert [Path(frame.filename).name for frame in beyond][-1] == "gate.py"
    assert len(beyond) <= 2, "it went deeper than the method that was called"


def test_with_leases_the_same_line_is_refused_where_it_stands(base: Path) -> None:
    with real_parts(base, Watching(), *SHORT) as parts:
        sync.run(parts, steps=3)
        trainer = parts.trainer
        with parts.residency.awake(trainer):
            begun = trainer.named_weights()
            next(begun)
        with parts.residency.awake(parts.engine):
            assert asleep(parts)

            def naive_save() -> object:
                return {name: tensor.clone() for name, tensor in trainer.named_weights()}

            refused_here(naive_save, "return {name: tensor.clone() for name, tensor in trainer.named_weights()}")

            def naive_save_that_had_begun() -> object:
                return next(begun)

            with pytest.raises(ResidencyError):
                naive_save_that_had_begun()

            def step_after_sleep() -> object:
                return trainer.begin("rl")

            refused_here(step_after_sleep, 'return trainer.begin("rl")')
            with pytest.raises(WeightSyncError, match="needs a lease of trainer"):
                parts.weights.update_weights(trainer, parts.engine, parts.engine.version)
        # Awake again or still, without a lease it is refused all the same.
        with parts.residency.awake(trainer):
            pass
        assert not asleep(parts)
        refused_here(naive_save, "return {name: tensor.clone() for name, tensor in trainer.named_weights()}")


def test_the_save_works_from_the_host_copy_while_the_trainer_sleeps_and_the_engine_answers(base: Path) -> None:
    seen, right = Watching(), {}
    with real_parts(base, seen, "steps=3", "warm_up.steps=1", "checkpoint.every=0") as parts:
        seen.at_record = lambda step: right.update({step: weights_now(parts)})
        state = sync.run(parts, steps=2)
        with parts.residency.awake(parts.engine):
            assert asleep(parts)
            before = parts.residency.transitions()
            parts.checkpointer.save(state)
            (answer,) = parts.engine.generate([Request(key="a", token_ids=(5, 6))], Sampling(max_new_tokens=2))
            parts.checkpointer.drain()
            assert parts.residency.transitions() == before
            assert asleep(parts)
        assert answer.version == state.policy_version
        assert saved_weights(base, 2) == right[1]
        assert right[1] != right[0]
        with parts.residency.awake(parts.trainer, Part.ALL):
            assert weights_now(parts) == right[1]
