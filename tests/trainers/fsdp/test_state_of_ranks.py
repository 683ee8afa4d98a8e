"""tidemill.trainers.fsdp.memory, .whole_weights, .ranks and .gathering: what each of several ranks holds.

Their modules: tidemill.trainers.fsdp.whole_weights, tidemill.trainers.fsdp.ranks, tidemill.trainers.fsdp.gathering.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainers.fsdp.rank_service import Groups, RankGroup, alone, joined
from transformers import AutoModelForCausalLM

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import LossInputs, LossOutput
from tidemill.contracts.checkpoint import Saved, TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError, ResidencyError, TrainerError, WorkerError
from tidemill.testing.suites.trainer import ragged_batch

Uneven = Callable[[bool], Path]
CLIP = ClipLoss(low=0.2, high=0.2)
BATCHES = [ragged_batch(seed=seed, rows=6, longest=20) for seed in range(4)]


def contents(saved: Saved) -> dict[str, Any]:
    """All but how many ranks there were."""
    extra = {name: value for name, value in saved.extra.items() if name not in ("ranks", "replicas")}
    return {name: (tensor.shape, bytes(tensor.data)) for name, tensor in saved.tensors.items()} | {"extra": extra}


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_a_snapshot_says_how_many_ranks_and_replicas_there_were(
    groups: Groups, uneven_models: Uneven, ranks: int, replicas: int
) -> None:
    extra = groups.start(uneven_models(True), ranks, replicas=replicas).saved().extra
    assert (extra["ranks"], extra["replicas"]) == (ranks, replicas)


def trained(group: RankGroup) -> RankGroup:
    for batch in BATCHES[:2]:
        group.step(batch, CLIP)
    return group


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_start_with_the_weights_and_buffers_of_a_model_built_on_the_cpu(
    groups: Groups, uneven_models: Uneven, tied: bool
) -> None:
    group = groups.start(uneven_models(tied), 4)
    expected = AutoModelForCausalLM.from_pretrained(uneven_models(tied), dtype=torch.float32)
    found = group.weights()
    assert list(found) == [name for name, _ in expected.named_parameters()]
    assert all((found[name] == value.detach().numpy()).all() for name, value in expected.named_parameters())
    for buffers in group.call("buffers"):
        assert buffers.keys() == dict(expected.named_buffers()).keys()
        assert all((buffers[name] == value.numpy()).all() for name, value in expected.named_buffers())
    specs = {name: ("F32", tuple(value.shape)) for name, value in expected.named_parameters()}
    assert group.agreed("specs") == specs


def test_a_rank_reads_and_holds_its_own_rows_and_no_other(groups: Groups, uneven_models: Uneven) -> None:
    folder = uneven_models(True)
    group = groups.start(folder, 4)
    shapes = {name: shape for name, (_, shape) in group.agreed("specs").items()}
    read, held = group.call("rows_read", folder), group.call("local_elements")
    for name, shape in shapes.items():
        width = int(np.prod(shape[1:], dtype=np.int64))
        assert [rank.get(name, 0) * width for rank in read] == [rank[name] for rank in held]
        assert sum(rank.get(name, 0) for rank in read) == shape[0]
    # 33 rows over 4 ranks are 9, 9, 9 and 6; 5 are 2, 2, 1 and none.
    assert [rank["model.embed_tokens.weight"] for rank in read] == [9, 9, 9, 6]
    assert [rank.get("model.layers.1.mlp.up_proj.weight", 0) for rank in read] == [2, 2, 1, 0]
    total = alone(folder).footprints()
    for rank in group.call("footprints"):
        assert rank["GRADS"] <= 0.31 * total["GRADS"]


def test_ranks_read_their_own_experts_and_hand_all_of_them_out(groups: Groups, uneven_models: Any) -> None:
    folder = uneven_models(False, "qwen3_moe")
    group, stored = groups.start(folder, 4), load_file(folder / "model.safetensors")
    read = group.call("rows_read", folder)
    for number in range(3):
        name = f"model.layers.1.mlp.experts.{number}.up_proj.weight"
        assert [rank.get(name, 0) for rank in read] == [8 * (rank == number) for rank in range(4)]
    assert group.agreed("specs") == {name: ("F32", tuple(tensor.shape)) for name, tensor in stored.items()}
    found = group.weights()
    assert found.keys() == stored.keys()
    assert all((found[name] == tensor.numpy()).all() for name, tensor in stored.items())


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_sleeping_and_parking_between_steps_change_no_bit(
    groups: Groups, uneven_models: Uneven, ranks: int, replicas: int
) -> None:
    found = []
    for sleeps in (False, True):
        group = groups.start(uneven_models(True), ranks, replicas=replicas, minibatches=2)
        reports = []
        for batch in BATCHES:
            # The root is left gathered by a pass without backward.
            logprobs = group.log_probs(batch)
            if sleeps:
                group.call("sleep")
                group.call("park")
                assert group.agreed("resident") == Part.NONE
                group.call("wake_up")
                group.call("revive")
            reports.append((group.step(batch, CLIP), logprobs.tobytes()))
        found.append((reports, contents(group.saved())))
    assert found[0] == found[1]


def test_a_sleeping_rank_refuses_to_compute_and_its_snapshot_needs_no_other_rank(
    groups: Groups, uneven_models: Uneven
) -> None:
    group = trained(groups.start(uneven_models(True), 2))
    awake = contents(group.saved())
    group.call("sleep")
    group.call("park")
    with pytest.raises(ResidencyError):
        group.call("step", BATCHES[0], CLIP)
    pieces = [group.group.start(rank, "pieces").result(10.0)[0] for rank in (1, 0)]
    assert contents(Saved(tensors=joined(pieces), extra=awake["extra"])) == awake
    group.call("wake_up")
    group.call("revive")
    assert not group.step(BATCHES[2], CLIP)[1]


def test_only_the_first_copy_of_the_model_is_saved(groups: Groups, uneven_models: Uneven) -> None:
    group = groups.start(uneven_models(True), 4, replicas=2)
    pieces = [tensors for tensors, _ in group.call("pieces")]
    assert [bool(tensors) for tensors in pieces] == [True, True, False, False]
    assert joined(pieces).keys() == alone(uneven_models(True)).pieces()[0].keys()


@pytest.mark.parametrize(("first", "second"), [((2, 1), (4, 1)), ((4, 2), (2, 1)), ((4, 1), (1, 1)), ((1, 1), (4, 2))])
def test_what_some_ranks_saved_others_load_to_the_bit_and_go_on_with(
    groups: Groups, uneven_models: Uneven, first: tuple[int, int], second: tuple[int, int]
) -> None:
    folder = uneven_models(True)
    saved = trained(groups.start(folder, first[0], replicas=first[1])).saved()
    group = groups.start(folder, second[0], replicas=second[1])
    # A pass before: what it gathered must not be taken for the weights that are loaded.
    group.log_probs(BATCHES[0])
    group.call("load", saved)
    assert contents(group.saved()) == contents(saved)
    weights = group.weights()
    assert {name: value.tobytes() for name, value in weights.items()} == {
        name.removeprefix("model/"): bytes(tensor.data)
        for name, tensor in saved.tensors.items()
        if name.startswith("model/")
    }
    one = alone(folder)
    one.load(saved)
    assert group.log_probs(BATCHES[3]) == pytest.approx(one.log_probs(BATCHES[3]), abs=2e-6)
    assert group.step(BATCHES[2], CLIP)[0]["policy/grad_norm"] == pytest.approx(
        one.step(BATCHES[2], CLIP)[0]["policy/grad_norm"], rel=1e-6
    )


def test_ranks_that_go_on_from_their_own_checkpoint_end_with_the_bits_of_a_run_never_stopped(
    groups: Groups, uneven_models: Uneven
) -> None:
    group = trained(groups.start(uneven_models(True), 2))
    saved = group.saved()
    group.step(BATCHES[2], CLIP)
    whole = contents(group.saved())
    resumed = groups.start(uneven_models(True), 2)
    resumed.call("load", saved)
    resumed.step(BATCHES[2], CLIP)
    assert contents(resumed.saved()) == whole


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    groups: Groups, uneven_models: Uneven
) -> None:
    group = trained(groups.start(uneven_models(True), 2))
    saved = group.saved()
    before = contents(saved)
    name = "optimizer/exp_avg/model.embed_tokens.weight"
    shorter = TensorBytes(dtype="F32", shape=(32, 24), data=memoryview(bytes(32 * 24 * 4)))
    other = TensorBytes(dtype="BF16", shape=(33, 24), data=memoryview(bytes(33 * 24 * 2)))
    wrong: list[dict[str, Any]] = [
        {key: value for key, value in saved.tensors.items() if key != name},
        {key: value for key, value in saved.tensors.items() if key != "model/model.norm.weight"},
        {**saved.tensors, "model/more": shorter},
        {**saved.tensors, name: shorter},
        {**saved.tensors, name: other},
    ]
    for tensors in wrong:
        with pytest.raises(CheckpointError, match="cannot load"):
            group.call("load", Saved(tensors=tensors, extra=saved.extra))
    assert contents(group.saved()) == before
    group.step(BATCHES[2], CLIP)


def fails(inputs: LossInputs) -> LossOutput:
    raise ValueError("no loss today")


def test_a_step_that_fails_on_every_rank_before_an_update_leaves_them_usable(
    groups: Groups, uneven_models: Uneven
) -> None:
    group = groups.start(uneven_models(True), 2)
    before = contents(group.saved())
    with pytest.raises(WorkerError, match="no loss today"):
        group.step(BATCHES[0], fails)
    assert contents(group.saved()) == before
    found = group.step(BATCHES[0], CLIP)
    assert found == groups.start(uneven_models(True), 2).step(BATCHES[0], CLIP)


def test_a_pass_that_fails_half_way_leaves_ranks_that_say_so_and_weights_that_can_be_saved(
    groups: Groups, uneven_models: Uneven
) -> None:
    group = trained(groups.start(uneven_models(True), 2))
    before = contents(group.saved())
    group.call("fail_in_layer", 0)
    with pytest.raises(WorkerError, match="no room for a gradient"):
        group.step(BATCHES[0], CLIP)
    for use in (lambda: group.step(BATCHES[0], CLIP), lambda: group.log_probs(BATCHES[0])):
        with pytest.raises(TrainerError, match="failed half-way"):
            use()
    assert contents(group.saved()) == before


def test_copies_that_do_not_divide_the_ranks_are_refused(groups: Groups, uneven_models: Uneven) -> None:
    with pytest.raises(TrainerError, match="3 copies of a model on 2 ranks"):
        groups.start(uneven_models(True), 2, replicas=3)
