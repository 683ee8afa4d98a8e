"""Lease, arena and parking with two trainer ranks and an engine in a process of its own: the whole life cycle."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoint.pieces import sums_of_pieces
from tests.residency.real_run import (
    SPAWNED,
    Watching,
    moves_of,
    prepare_learning,
    real_parts,
    saved_weights,
    weights_now,
)
from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import Event, Memory
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.errors import ConfigError, ResidencyError, WorkerError
from tidemill.loops import sync

STEPS = 5
SHORT = (f"steps={STEPS}", "warm_up.steps=1", "eval.every=0", "checkpoint.every=0", "checkpoint.keep_last=10")
RANKS = (SPAWNED, "trainer.ranks=2", "engine.replicas=1")
TURNS = ("residency.offload=always", "residency.park_groups=always")
ONE_ROUND = [
    "trainer.sleep",
    "engine.wake_up(kv cache)",
    "engine.sleep",
    "trainer.wake_up(weights, optimizer, grads)",
    "trainer.step",
    "engine.wake_up(weights)",
    "update_weights",
]
ANSWER = [Request(key="a", token_ids=(5, 6, 7))], Sampling(max_new_tokens=4, temperature=0.0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return prepare_learning(tmp_path)


def held(tenant: Any) -> int:
    return int(tenant.footprint(tenant.resident()))


def held_by_workers(tenant: Any) -> list[Part]:
    """What each worker itself says is on its device."""
    return [used.resident for used in tenant.group.call("use", Part.NONE, "stand", deadline=20)]


def groups_parked(trainer: Any) -> bool:
    return bool(trainer._parked)


def fullest(events: list[Event]) -> int:
    return max(sum(event.device.values()) for event in events if isinstance(event, Memory))


def processes(parts: Parts) -> list[psutil.Process]:
    trainer: Any = parts.trainer
    engine: Any = parts.engine
    return [psutil.Process(pid) for pid in (*trainer.group.pids, *engine.group.pids)]


def test_lease_arena_and_parking_pass_with_two_trainer_ranks_and_a_separate_engine_process(base: Path) -> None:
    seen, right = Watching(), {}
    with real_parts(base, seen, *SHORT, *RANKS, *TURNS) as parts:
        seen.at_record = lambda step: right.update({step + 1: weights_now(parts)})
        assert len({os.getpid(), *(process.pid for process in processes(parts))}) == 4
        state = sync.run(parts, steps=3)
        trainer, engine = parts.trainer, parts.engine
        with parts.residency.awake(engine):
            # Asleep on every rank, groups parked, and the file is written while the engine answers.
            assert held(trainer) == 0
            assert held_by_workers(trainer) == [Part.NONE, Part.NONE]
            assert groups_parked(trainer)
            before = parts.residency.transitions()
            parts.checkpointer.save(state)
            (answer,) = engine.generate(*ANSWER)
            parts.checkpointer.drain()
            assert parts.residency.transitions() == before
            for use in (lambda: trainer.begin("rl"), lambda: next(trainer.named_weights())):
                with pytest.raises(ResidencyError, match="needs a lease of trainer"):
                    use()
        assert answer.version == state.policy_version
        moves = moves_of(seen.events, trainer, engine)
        budget = [event.budget for event in seen.events if isinstance(event, Memory)][-1]
        assert budget < trainer.footprint(Part.ALL) + engine.footprint(Part.ALL)
        assert fullest(seen.events) <= budget
    assert moves[3:17] == ONE_ROUND * 2
    assert saved_weights(base, 3) == right[3]


def test_a_run_of_ranks_resumed_from_what_was_saved_asleep_ends_with_the_bits_of_one_that_never_slept(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = prepare_learning(tmp_path_factory.mktemp("never"))
    with real_parts(other, Watching(), *SHORT, *RANKS, "residency.offload=never") as parts:
        sync.run(parts, steps=STEPS)
        assert parts.residency.transitions()["trainer"][0] == 0
    with real_parts(base, Watching(), *SHORT, *RANKS, *TURNS) as parts:
        state = sync.run(parts, steps=3)
        assert held(parts.trainer) == 0
        parts.checkpointer.save(state)
        parts.checkpointer.drain()
    with real_parts(base, Watching(done=3), *SHORT, *RANKS, *TURNS) as parts:
        assert sync.run(parts, steps=STEPS).step == STEPS
    assert saved_weights(base, STEPS) == saved_weights(other, STEPS)
    assert optimizer_of(base) == optimizer_of(other)


def optimizer_of(base: Path) -> dict[str, str]:
    """Checksum of each piece of the moments in the last checkpoint."""
    found = sums_of_pieces(base / "run" / "checkpoints" / f"step-{STEPS:08d}")
    assert any(name.startswith("optimizer/") for name in found)
    return found


def test_twenty_rounds_leave_threads_and_files_of_every_process_flat(base: Path) -> None:
    words = ("steps=40", *SHORT[1:], *RANKS, *TURNS)
    with real_parts(base, Watching(), *words) as parts:
        state = sync.run(parts, steps=5)
        counts = []
        for _ in range(20):
            state = sync.step(parts, state)
            counts.append([(process.num_threads(), process.num_fds()) for process in processes(parts)])
        assert counts[-1] == counts[2], counts
        host = {event.host["trainer"] for event in parts.recorder.events if isinstance(event, Memory)}  # type: ignore[attr-defined]
    assert len(host - {0}) == 1


def test_with_room_for_both_no_rank_sleeps_and_no_group_is_parked(base: Path) -> None:
    seen = Watching()
    with real_parts(base, seen, *SHORT, *RANKS, "residency.offload=never") as parts:
        sync.run(parts, steps=3)
        assert not [move for move in moves_of(seen.events, parts.trainer, parts.engine) if "sleep" in move]
        assert Part.NONE not in held_by_workers(parts.trainer)


def test_a_budget_too_small_for_the_fullest_rank_is_refused_before_the_first_step_with_the_ledger(base: Path) -> None:
    with real_parts(base, Watching(), *SHORT, *RANKS) as parts:
        trainer, engine = parts.trainer, parts.engine
        least = max(trainer.footprint(Part.ALL) + engine.footprint(Part.WEIGHTS), engine.footprint(Part.ALL))
    seen = Watching()
    words = ("residency.offload=auto", f"residency.budget={least - 1}")
    with (
        pytest.raises(ConfigError, match="must be awake at once.*residency.budget"),
        real_parts(base, seen, *SHORT, *RANKS, *words),
    ):
        raise AssertionError("parts were built")
    assert seen.lines == {}


def test_a_rank_that_dies_asleep_is_named_at_the_wake_and_what_was_saved_carries_the_run_on(base: Path) -> None:
    with real_parts(base, Watching(), *SHORT, *RANKS, *TURNS) as parts:
        state = sync.run(parts, steps=3)
        assert held(parts.trainer) == 0
        parts.checkpointer.save(state)
        parts.checkpointer.drain()
        trainer: Any = parts.trainer
        psutil.Process(trainer.group.pids[1]).kill()
        with pytest.raises(WorkerError, match="trainer-1"), parts.residency.awake(trainer):
            raise AssertionError("a lease was granted")
    with real_parts(base, Watching(done=3), *SHORT, *RANKS, *TURNS) as parts:
        assert sync.run(parts, steps=STEPS).step == STEPS
