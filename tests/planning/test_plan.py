"""Moments of a run, who sleeps in them and what cannot be (`tidemill.planning.plan`).

With it `tidemill.planning.moments`, `tidemill.planning.tenants` and the others that it is made of.
"""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planning.conftest import CPU, GPU, Settings

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.planning.budget import NO_LIMIT
from tidemill.planning.choice import CONTEXT_BYTES
from tidemill.planning.machine import Machine
from tidemill.planning.plan import Plan, plan_of
from tidemill.planning.setup import setup_of
from tidemill.planning.table import show
from tidemill.planning.verdict import problems
from tidemill.units import GIB, MIB

QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
PARAMETERS = 1_720_574_976
RAY = ["cluster.use=ray", "trainer.ranks=2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").write_text(json.dumps(QWEN3_1_7B))
    return tmp_path / "qwen3"


def moments(plan: Plan, seat: int = 0) -> dict[str, Any]:
    return {moment.name: moment for moment in plan.seats[seat].moments}


def test_parts_are_what_the_arithmetic_says(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model), GPU)
    assert plan.model.parameters == PARAMETERS
    parts = moments(plan)["optimizer"].parts
    assert parts["trainer/weights"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert parts["trainer/moments"] == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert parts["context"] == CONTEXT_BYTES
    assert plan.tenants.engine_weights == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert plan.tenants.cache == 2 * 28 * 8 * 128 * 2 * 64 * (1024 + 256)


def test_with_room_for_both_nobody_sleeps(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model), GPU)
    assert not plan.choice.turns and "both stay awake" in plan.choice.sentence
    found = moments(plan)
    assert "asleep" not in found
    assert {"trainer/weights", "engine/cache"} <= set(found["rollout"].parts)
    assert {"trainer/activations", "engine/weights"} <= set(found["forward and backward"].parts)


def test_turns_leave_the_device_to_one_of_them_but_for_the_hand_over(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model, "residency.offload=always"), GPU)
    assert plan.choice.turns
    found = moments(plan)
    owners = {name: {part.split("/")[0] for part in moment.parts} for name, moment in found.items()}
    assert owners == {
        "start": {"trainer", "context"},
        "rollout": {"engine", "context"},
        "forward and backward": {"trainer", "context"},
        "optimizer": {"trainer", "context"},
        "save": {"trainer", "context"},
        "hand-over": {"trainer", "engine", "context"},
        "asleep": {"context"},
    }
    assert "engine/cache" not in found["hand-over"].parts


@pytest.mark.parametrize(
    "words", [[], ["trainer.offload=never"], ["engine.offload=always"], ["residency.budget=40GiB"]]
)
def test_who_sleeps_is_decided_as_the_run_decides_it(model: Path, settings: Settings, words: list[str]) -> None:
    config = settings(model, *words)
    for size in (20, 30, 40, 60, 141):
        plan = plan_of(config, replace(GPU, device_bytes=size * GIB))
        both = plan.tenants.state.footprint + plan.tenants.engine
        assert plan.choice.budget is not None
        assert plan.choice.turns == (both > plan.choice.budget)
        if not words:
            assert plan.choice.turns == (size * GIB < plan.choice.both_from)
            assert bool(plan.choice.refusal) == (size * GIB < plan.choice.least)


def test_of_an_unknown_device_turns_are_shown_and_nothing_is_refused(model: Path, settings: Settings) -> None:
    config = settings(model)
    plan = plan_of(config, replace(GPU, device_bytes=None))
    assert plan.choice.turns and plan.choice.budget is None and "not known" in plan.choice.sentence
    assert problems(plan, config) == []
    assert (
        plan_of(settings(model, "residency.offload=never"), replace(GPU, device_bytes=None)).choice.budget == NO_LIMIT
    )


def test_ranks_share_what_is_cut_and_not_what_is_gathered(model: Path, settings: Settings) -> None:
    alone = moments(plan_of(settings(model), GPU))["forward and backward"].parts
    plan = plan_of(settings(model, *RAY), GPU)
    (seat,) = plan.seats
    parts = moments(plan)["forward and backward"].parts
    assert (seat.name, seat.count) == ("trainer and engine", 2)
    assert parts["trainer/weights"] == pytest.approx(alone["trainer/weights"] / 2, rel=0.01)
    assert parts["trainer/groups"] == 484 * MIB and parts["context"] == 2 * CONTEXT_BYTES
    assert parts["trainer/copies"] > 2 * 151936 * 2048
    copied = plan_of(settings(model, *RAY, "trainer.replicas=2"), GPU)
    assert copied.tenants.state.weights == pytest.approx(alone["trainer/weights"], rel=0.01)


def test_engines_apart_have_gpus_of_their_own(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model, *RAY, "cluster.placement=separate", "engine.replicas=3"), GPU)
    assert [(seat.name, seat.count) for seat in plan.seats] == [("trainer", 2), ("engine", 3)]
    assert not plan.choice.turns
    assert not any(part.startswith("engine") for moment in plan.seats[0].moments for part in moment.parts)
    assert not any(part.startswith("trainer") for moment in plan.seats[1].moments for part in moment.parts)
    assert any("trainer/staging" in moment.parts for moment in plan.host)


def test_parked_groups_are_gone_while_the_engine_works(model: Path, settings: Settings) -> None:
    config = settings(model, *RAY, "residency.offload=always")
    assert "trainer/groups" not in moments(plan_of(config, GPU))["rollout"].parts
    kept = settings(model, *RAY, "residency.offload=always", "residency.park_groups=never")
    assert "trainer/groups" in moments(plan_of(kept, GPU))["rollout"].parts


def test_on_a_cpu_all_of_it_is_host_memory(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model, *RAY), CPU)
    assert plan.seats == ()
    start = plan.host[0].parts
    assert start["trainer/weights"] == 2 * plan.tenants.state.weights
    assert start["trainer/pages"] >= 2 * plan.tenants.state.kept
    assert plan.largest_on_host.bytes == max(moment.bytes for moment in plan.host)


def test_recomputing_and_smaller_micro_batches_take_less(model: Path, settings: Settings) -> None:
    def activations(*words: str) -> int:
        parts = moments(plan_of(settings(model, "residency.offload=always", *words), GPU))["forward and backward"].parts
        return int(parts["trainer/activations"])

    assert activations("trainer.recompute=true") < activations() / 3
    assert activations("trainer.tokens_per_micro_batch=4096") < activations() / 3


def test_a_step_that_is_smaller_than_a_micro_batch_counts_as_it_is(model: Path, settings: Settings) -> None:
    words = [
        "rollout.prompts=2",
        "rollout.samples=4",
        "data.max_prompt_tokens=100",
        "rollout.sampling.max_new_tokens=29",
    ]
    (work,) = setup_of(settings(model, *words), device="cpu").phases
    assert (work.tokens, work.trained, work.passes) == (8 * 128, 8 * 29, 1)
    (cut,) = setup_of(settings(model, *words, "trainer.tokens_per_micro_batch=256"), device="cpu").phases
    assert (cut.tokens, cut.trained, cut.passes) == (256, 232, 4)
    warm = settings(model, *words, "warm_up.steps=1", "warm_up.data=demonstrations", "warm_up.batch=16")
    assert [work.tokens for work in setup_of(warm, device="cpu").phases] == [8 * 128, 16 * 128]


def test_a_replay_has_no_engine(model: Path, settings: Settings, tmp_path: Path) -> None:
    plan = plan_of(settings(model, f"rollout.replay={tmp_path / 'rollouts'}", "rollout.dump=false"), GPU)
    assert not plan.choice.turns
    assert {part.split("/")[0] for moment in plan.seats[0].moments for part in moment.parts} == {"trainer", "context"}
    assert set(plan.tenants_json()) == {"trainer"}


def refused(config: RunConfig, machine: Machine) -> str:
    return "\n".join(problems(plan_of(config, machine), config))


def test_what_cannot_fit_a_gpu_is_refused_with_what_to_change(model: Path, settings: Settings) -> None:
    assert refused(settings(model), replace(GPU, device_bytes=141 * GIB)) == ""
    said = refused(settings(model), replace(GPU, device_bytes=48 * GIB))
    assert "cannot fit into the 48.0 GiB of a GPU (trainer and engine): forward and backward takes" in said
    assert "lower trainer.tokens_per_micro_batch (16384); set trainer.recompute=true" in said
    said = refused(settings(model, "residency.offload=never"), replace(GPU, device_bytes=48 * GIB))
    assert "set residency.offload=always, so that trainer and engine take turns" in said
    said = refused(settings(model), replace(GPU, device_bytes=20 * GIB))
    assert "must be awake at once" in said and "raise residency.budget" in said
    said = refused(
        settings(model, "engine.max_batch=512", "residency.offload=never"), replace(GPU, device_bytes=48 * GIB)
    )
    assert "lower engine.max_batch (512), data.max_prompt_tokens (1024)" in said
    said = refused(settings(model, *RAY, "trainer.replicas=2", "trainer.tokens_per_micro_batch=1280"), GPU)
    assert said == ""


def test_what_cannot_fit_the_host_is_refused_with_what_to_change(model: Path, settings: Settings) -> None:
    said = refused(settings(model), replace(GPU, host_bytes=16 * GIB))
    assert "cannot fit into the 16.0 GiB of host memory that can be had" in said
    assert "choose a smaller model, or spread trainer.ranks over more hosts" in said
    assert "at which sleeps wait longer for saves; that alone is not enough" in said
    assert refused(settings(model), replace(GPU, device_bytes=141 * GIB, host_bytes=None)) == ""


@pytest.mark.parametrize(("size", "name"), [(GIB // 2, "context"), (3 * GIB, "engine/weights")])
def test_a_gpu_full_of_what_no_setting_lowers_is_no_place_for_more_ranks(
    model: Path, settings: Settings, size: int, name: str
) -> None:
    said = refused(settings(model), replace(GPU, device_bytes=size))
    assert "what no setting lowers takes" in said and name in said
    assert said.endswith("choose a smaller model, or a larger GPU") and len(said.splitlines()) == 1
    assert "trainer.ranks" not in said and "residency.budget" not in said
    assert "raise trainer.ranks (1)" in refused(
        settings(model, "trainer.tokens_per_micro_batch=1280"), replace(GPU, device_bytes=12 * GIB)
    )


def test_prompts_and_answers_longer_than_the_model_sees_are_refused(model: Path, settings: Settings) -> None:
    words = ["data.max_prompt_tokens=40704", "engine.max_batch=1"]
    assert "max_position_embeddings" not in refused(settings(model, *words), GPU)
    said = refused(settings(model, *words, "rollout.sampling.max_new_tokens=257"), GPU)
    assert "(257) come to 40961 positions, and the model has 40960 (max_position_embeddings" in said


def test_a_host_with_room_for_no_more_than_the_state_is_told_of_spare_pages(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model, *RAY), GPU)
    there = plan.largest_on_host.bytes - plan.setup.ranks * plan.tenants.arena.spares // 2
    said = refused(settings(model, *RAY), replace(GPU, host_bytes=there))
    found = re.search(r"lower residency\.spare \(auto, .* a rank\) to (\d+MiB), at which sleeps wait longer", said)
    assert found and "not enough" not in said
    assert refused(settings(model, *RAY, f"residency.spare={found[1]}"), replace(GPU, host_bytes=there)) == ""
    none = settings(model, *RAY, "residency.spare=0")
    assert plan_of(none, GPU).tenants.arena.spares == 0
    assert "residency.spare" not in refused(none, replace(GPU, host_bytes=GIB))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("trainer.use=tests.planning.plugged:Trainer", "trainer"),
        ("cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings", "cluster"),
    ],
)
def test_parts_that_nobody_knows_are_not_guessed(model: Path, settings: Settings, word: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot plan for {name}\.use"):
        plan_of(settings(model, word), GPU)


def test_a_plan_has_one_shape(model: Path, settings: Settings) -> None:
    plan = plan_of(settings(model), GPU)
    found = json.loads(json.dumps(plan.to_json()))
    assert set(found) == {"model", "machine", "offload", "tenants", "devices", "host", "disk"}
    assert set(found["offload"]) == {
        *("mode", "budget", "turns", "parks_groups", "both_awake_from", "refused_below", "text")
    }
    (device,) = found["devices"]
    assert device["largest"] == "forward and backward"
    for moment in [*device["moments"], *found["host"]["moments"]]:
        assert moment["bytes"] == sum(moment["parts"].values())
    assert found["tenants"]["trainer"]["device"] == plan.tenants.state.footprint
    assert plan_of(settings(model, "residency.offload=never"), GPU).to_json()["offload"]["budget"] is None


def test_the_table_shows_each_moment_and_marks_the_largest(model: Path, settings: Settings) -> None:
    written = io.StringIO()
    show(plan_of(settings(model, "residency.offload=always"), replace(GPU, device_bytes=40 * GIB)), written)
    lines = written.getvalue().splitlines()
    assert lines[0] == "qwen3: qwen3, 1,720.6M parameters, tied embeddings (from config.json)"
    assert "the GPU (trainer and engine): 40.0 GiB there" in lines
    assert max(map(len, lines)) <= 110
    starts = [line.split("  ")[0] for line in lines]
    for name in ("start", "rollout", "forward and backward", "optimizer", "save", "hand-over", "asleep"):
        assert starts.count(name) == 2, name
    assert sum("<- the largest" in line for line in lines) == 2
