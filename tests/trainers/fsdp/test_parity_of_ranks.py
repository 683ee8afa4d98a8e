"""tidemill.trainers.fsdp.updates and tidemill.trainers.fsdp.sharding: 1, 2 and 4 ranks compute the same.

What "the same" is, in float32: after each of several updates gradient norm, log-likelihood and mismatch agree within
1e-6 relatively (near 0, 1e-7 absolutely), the loss, in which advantages of either sign and of order 1 cancel, within
1e-6; after all of them every weight tensor agrees within 1e-6 of its norm, and every log-probability of a batch never
seen within 2e-6 nats. In bfloat16 one rank keeps the residual stream in float32
(autocast) and several cut it to bfloat16 with everything else: log-probs of the first pass agree within 0.05 nats, 0.01
on average.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainers.fsdp.rank_service import Groups, RankGroup, RankService, alone
from transformers import AutoModelForCausalLM

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.batch import Batch
from tidemill.testing.suites.trainer import ragged_batch

Uneven = Callable[[bool], Path]
CLIP = ClipLoss(low=0.2, high=0.2)
EXACT = {"policy/updates_skipped", "policy/updates_empty", "policy/lr", "train/tokens", "policy/clip_fraction"}


def batches() -> list[Batch]:
    """Ragged; the third has fewer rows than there are ranks, and the last rows that are not trained on."""
    few = ragged_batch(seed=2, rows=2, longest=30)
    sparse = ragged_batch(seed=4, rows=8, longest=30)
    mask = sparse.loss_mask.copy()
    mask[: sparse.offsets[5]] = False
    return [
        ragged_batch(seed=0, rows=10, longest=30),
        ragged_batch(seed=1, rows=12, longest=9),
        few,
        ragged_batch(seed=3, rows=6, longest=40),
        replace(sparse, loss_mask=mask),
    ]


def metrics_agree(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        relative, absolute = (0.0, 0.0) if name in EXACT else (1e-6, 1e-6 if name == "policy/loss" else 1e-7)
        if name != "train/padding_fraction":
            assert found[name] == pytest.approx(value, rel=relative, abs=absolute), name


def weights_agree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        apart = np.linalg.norm((found[name].astype(np.float64) - value).ravel())
        assert apart <= 1e-6 * np.linalg.norm(value.astype(np.float64).ravel()), name


def agree(one: RankService, group: RankGroup) -> None:
    for batch in batches():
        expected, found = one.step(batch, CLIP), group.step(batch, CLIP)
        assert found[1] == expected[1]
        metrics_agree(found[0], expected[0])
    weights_agree(group.weights(), one.weights())
    unseen = ragged_batch(seed=9, rows=7, longest=30)
    assert group.log_probs(unseen) == pytest.approx(one.log_probs(unseen), abs=2e-6)


VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "tied": (True, {}),
    "untied, two minibatches, clipped, recomputed": (
        False,
        {"minibatches": 2, "tokens_per_micro_batch": 25, "max_grad_norm": 0.05, "recompute": True},
    ),
    "a row a pass": (True, {"tokens_per_micro_batch": 1, "max_grad_norm": 0.0}),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_what_one_rank_does(groups: Groups, uneven_models: Uneven, variant: str, ranks: int) -> None:
    tied, changes = VARIANTS[variant]
    agree(alone(uneven_models(tied), **changes), groups.start(uneven_models(tied), ranks, **changes))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_experts_compute_what_one_rank_does(groups: Groups, uneven_models: Any, ranks: int) -> None:
    """Three of them: one of two ranks has two, and one of four none."""
    folder = uneven_models(False, "qwen3_moe")
    agree(alone(folder, recompute=True), groups.start(folder, ranks, recompute=True))


@pytest.mark.parametrize("replicas", [2, 4])
def test_copies_of_the_model_compute_what_one_rank_does(groups: Groups, uneven_models: Uneven, replicas: int) -> None:
    changes = {"minibatches": 2, "max_grad_norm": 0.05}
    agree(alone(uneven_models(True), **changes), groups.start(uneven_models(True), 4, replicas=replicas, **changes))


def test_the_gradient_norm_over_ranks_is_that_of_a_naive_twin_in_float64(groups: Groups, uneven_models: Uneven) -> None:
    batch = ragged_batch(seed=5, rows=6, longest=20)
    network = AutoModelForCausalLM.from_pretrained(uneven_models(True), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids, wanted = torch.from_numpy(batch.token_ids[start:end]), torch.from_numpy(batch.loss_mask[start:end])[1:]
        chosen = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (chosen * torch.from_numpy(batch.advantages[start:end])[1:])[wanted].sum()
    (total / int(batch.loss_mask.sum())).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in network.parameters()]).norm()
    metrics, _ = groups.start(uneven_models(True), 4).step(batch, CLIP)
    assert metrics["policy/grad_norm"] == pytest.approx(float(norm), rel=2e-6)


def test_recomputing_activations_changes_no_bit_on_ranks(groups: Groups, uneven_models: Uneven) -> None:
    found = []
    for recompute in (False, True):
        group = groups.start(uneven_models(True), 2, recompute=recompute)
        reports = [group.step(batch, CLIP) for batch in batches()]
        found.append((reports, {name: value.tobytes() for name, value in group.weights().items()}))
    assert found[0] == found[1]


def test_bfloat16_on_ranks_is_near_that_of_one_rank(groups: Groups, uneven_models: Uneven) -> None:
    one = alone(uneven_models(True), compute_dtype="bfloat16")
    group = groups.start(uneven_models(True), 2, compute_dtype="bfloat16")
    batch = ragged_batch(seed=0, rows=10, longest=30)
    apart = np.abs(group.log_probs(batch) - one.log_probs(batch))
    assert apart.max() < 0.05
    assert apart.mean() < 0.01
    norms = [trainer.step(batch, CLIP)[0]["policy/grad_norm"] for trainer in (one, group)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    assert {value.dtype for value in group.weights().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(
    groups: Groups, uneven_models: Uneven, garbage: float
) -> None:
    one, group = alone(uneven_models(True), minibatches=2), groups.start(uneven_models(True), 2, minibatches=2)
    batch = ragged_batch(seed=0, rows=8, longest=20)
    spoiled = batch.advantages.copy()
    spoiled[int(np.flatnonzero(batch.loss_mask)[0])] = garbage
    for given in (batch, replace(batch, advantages=spoiled), batch):
        expected, found = one.step(given, CLIP), group.step(given, CLIP)
        metrics_agree(found[0], expected[0])
    weights_agree(group.weights(), one.weights())
    assert group.saved().extra["optimizer_steps"] == 5


def test_a_batch_without_a_token_to_train_on_is_no_update_on_any_rank(groups: Groups, uneven_models: Uneven) -> None:
    group, batch = groups.start(uneven_models(True), 2), ragged_batch(rows=4)
    before = {name: value.tobytes() for name, value in group.weights().items()}
    metrics, skipped = group.step(replace(batch, loss_mask=np.zeros_like(batch.loss_mask)), CLIP)
    assert skipped == "no token was left to train on"
    assert metrics["policy/updates_empty"] == 1.0
    assert {name: value.tobytes() for name, value in group.weights().items()} == before


def test_ranks_that_are_given_the_whole_batch_take_their_own_shares(groups: Groups, uneven_models: Uneven) -> None:
    found = []
    for whole in (True, False):
        group = groups.start(uneven_models(True), 2, minibatches=2)
        batch = ragged_batch(rows=8)
        report = group.agreed("step", batch, CLIP) if whole else group.step(batch, CLIP)
        found.append((report, {name: value.tobytes() for name, value in group.weights().items()}))
    assert found[0] == found[1]
