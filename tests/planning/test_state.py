"""Planned bytes are those that trainer and engine say of themselves (`tidemill.planning.state`, `.tenants`)."""

import functools
from pathlib import Path
from typing import Any

import pytest
from tests.planning.conftest import CPU, Settings

from tidemill.app import build
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.planning.plan import plan_of
from tidemill.planning.state import arena_of
from tidemill.testing.spawned_cluster import SpawnedCluster
from tidemill.testing.tiny import make_tiny_model
from tidemill.units import MIB

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3, tied": {"family": "qwen3", "tied": True, "hidden": 96, "layers": 3, "kv_heads": 2},
    "llama, untied": {"family": "llama", "tied": False, "hidden": 64, "layers": 1, "kv_heads": 1},
    "qwen2, wide": {"family": "qwen2", "tied": False, "hidden": 128, "intermediate": 1000},
}
WORDS = ["engine.max_batch=3", "data.max_prompt_tokens=40", "rollout.sampling.max_new_tokens=11"]


@pytest.mark.parametrize("page", ["64 MiB", "100 KiB"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_and_its_engine_hold_what_was_planned(
    tmp_path: Path, settings: Settings, shape: str, page: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", **SHAPES[shape])
    config = settings(folder, *WORDS, f'residency.page="{page}"')
    planned = plan_of(config, CPU).tenants
    trainer = build.build_trainer(config, Place(device="cpu"), ignore)
    engine = build.build_engine(config, Place(device="cpu"), ignore)
    try:
        assert planned.state.weights == trainer.footprint(Part.WEIGHTS)
        assert planned.state.moments == trainer.footprint(Part.OPTIMIZER)
        assert planned.state.gradients == trainer.footprint(Part.GRADS)
        assert planned.engine_weights == engine.footprint(Part.WEIGHTS)
        assert planned.cache == engine.footprint(Part.KV_CACHE)
        assert planned.engine_host == engine.host_bytes()
        assert planned.sizes() == {
            "trainer_bytes": trainer.footprint(Part.ALL),
            "engine_weight_bytes": engine.footprint(Part.WEIGHTS),
            "engine_bytes": engine.footprint(Part.ALL),
        }
    finally:
        trainer.close()


@pytest.mark.parametrize("page", ["1", "1000", "4096", "100 KiB", "64 MiB"])
@pytest.mark.parametrize("spare", ["auto", "0", "5000", "1 MiB"])
def test_host_pages_are_as_many_as_planned(tmp_path: Path, settings: Settings, page: str, spare: str) -> None:
    folder = make_tiny_model(tmp_path / "model", **SHAPES["qwen3, tied"])
    config = settings(folder, *WORDS, f'residency.page="{page}"', f'residency.spare="{spare}"')
    planned = plan_of(config, CPU).tenants.arena
    trainer = build.build_trainer(config, Place(device="cpu"), ignore)
    try:
        assert planned.pages + planned.spares == trainer.host_bytes()
    finally:
        trainer.close()


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_the_fullest_of_several_ranks_holds_what_was_planned(
    tmp_path: Path, settings: Settings, ranks: int, replicas: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=72, layers=2, heads=4, kv_heads=2)
    words = ["cluster.use=ray", f"trainer.ranks={ranks}", f"trainer.replicas={replicas}", "run.threads=1"]
    config = settings(folder, *WORDS, *words)
    planned = plan_of(config, CPU)
    cluster = SpawnedCluster(
        device="cpu",
        ranks=ranks,
        replicas=1,
        max_batch=3,
        seed=0,
        threads=1,
        transition_deadline=60,
        log_folder=tmp_path,
        emit=ignore,
        deadline=120,
    )
    try:
        trainer = cluster.trainer(functools.partial(build.build_trainer, config), ranks=ranks)
        assert planned.tenants.state.footprint == pytest.approx(trainer.footprint(Part.ALL), rel=0.01)
        assert planned.tenants.state.kept == trainer.footprint(Part.WEIGHTS | Part.OPTIMIZER)
        assert planned.tenants_json()["trainer"]["host"] == pytest.approx(trainer.host_bytes(), rel=0.02)
        trainer.close()
    finally:
        cluster.close()


def test_without_state_there_are_no_pages() -> None:
    arena = arena_of((), page_bytes=MIB, spare_bytes=MIB)
    assert (arena.pages, arena.spares) == (0, 0)


def test_spare_pages_are_a_tenth_of_the_state_and_two_at_least() -> None:
    large = arena_of([MIB] * 100, page_bytes=MIB, spare_bytes=None)
    assert (large.pages, large.spares) == (100 * MIB, 10 * MIB)
    assert arena_of([MIB], page_bytes=MIB, spare_bytes=None).spares == 2 * MIB


def test_spare_pages_are_as_many_as_fit_into_what_is_set() -> None:
    found = [arena_of([MIB] * 100, page_bytes=MIB, spare_bytes=set_).spares for set_ in (0, MIB - 1, MIB, 7 * MIB + 1)]
    assert found == [0, 0, MIB, 7 * MIB]
