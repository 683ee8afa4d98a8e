"""tidemill.trainers.fsdp.passes: gradients are those of one big batch, and of a naive twin in float64."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import LossInputs, LossOutput
from tidemill.contracts.batch import Batch
from tidemill.testing.suites.trainer import ragged_batch
from tidemill.trainers.fsdp.model import ComputeDtype, PolicyModel, load_predictor
from tidemill.trainers.fsdp.passes import Passes
from tidemill.trainers.fsdp.ranks import Alone
from tidemill.trainers.fsdp.tally import Tally

Models = Callable[..., Path]
CPU = torch.device("cpu")
LOSS = ClipLoss(low=0.2, high=0.2)


def build(folder: Path, *, tokens: int, recompute: bool = False, dtype: ComputeDtype = "float32") -> Passes:
    predictor = load_predictor(folder, device=CPU, recompute=recompute)
    model = PolicyModel(predictor, device=CPU, autocast=getattr(torch, dtype))
    return Passes(model=model, device=CPU, tokens_per_micro_batch=tokens)


def gradient(passes: Passes, batch: Batch) -> Tensor:
    """The mean's gradient over all parameters as one vector, in float64."""
    parts = passes.plan(batch)
    count, _ = passes.accumulate(parts, [], LOSS, Tally(), temperature=batch.temperature)
    grads = [parameter.grad for parameter in passes.model.predictor.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None]) / count


def log_probs(passes: Passes, batch: Batch) -> np.ndarray:
    return passes.log_probs(passes.plan_all(batch), batch)


def naive_gradient(folder: Path, batch: Batch) -> Tensor:
    """All rows padded to the right in one rectangle with an attention mask, float64, loss written out."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
    lengths = np.diff(batch.offsets)
    shape = (batch.rows, int(lengths.max()))
    ids, attention, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    advantages = torch.zeros(shape, dtype=torch.float64)
    for row, (start, length) in enumerate(zip(batch.offsets, lengths, strict=False)):
        span = slice(start, start + length)
        ids[row, :length] = torch.from_numpy(batch.token_ids[span])
        attention[row, :length] = 1
        mask[row, :length] = torch.from_numpy(batch.loss_mask[span])
        advantages[row, :length] = torch.from_numpy(batch.advantages[span])
    logits = network(input_ids=ids, attention_mask=attention).logits[:, :-1] / batch.temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logprobs - logprobs.detach()).exp()
    total = -(ratio * advantages[:, 1:] * mask[:, 1:]).sum() / mask[:, 1:].sum()
    total.backward()
    grads = [parameter.grad for parameter in network.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


BATCH = ragged_batch(rows=16, longest=40, seed=3)


@pytest.mark.parametrize("tokens", [1, 50, 100, 200])
def test_the_gradient_does_not_depend_on_micro_batches(tiny_models: Models, tokens: int) -> None:
    whole = gradient(build(tiny_models(), tokens=10_000), BATCH)
    assert apart(gradient(build(tiny_models(), tokens=tokens), BATCH), whole) < 1e-6


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_a_naive_twin_in_float64(
    tiny_models: Models, family: str, tied: bool, temperature: float
) -> None:
    folder, batch = tiny_models(family, tied), replace(BATCH, temperature=temperature)
    assert apart(gradient(build(folder, tokens=120), batch), naive_gradient(folder, batch)) < 2e-6


def test_the_gradient_does_not_depend_on_the_order_of_rows(tiny_models: Models) -> None:
    def reordered(name: str) -> np.ndarray:
        rows = [vars(BATCH)[name][BATCH.offsets[row] : BATCH.offsets[row + 1]] for row in reversed(range(BATCH.rows))]
        return np.concatenate(rows)

    names = ("token_ids", "loss_mask", "logprobs", "advantages")
    lengths = np.diff(BATCH.offsets)[::-1]
    turned = replace(
        BATCH,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        **{name: reordered(name) for name in names},
    )
    passes = [gradient(build(tiny_models(), tokens=100), batch) for batch in (BATCH, turned)]
    assert apart(*passes) < 1e-6


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_recomputing_activations_changes_no_gradient(tiny_models: Models, family: str) -> None:
    kept = gradient(build(tiny_models(family), tokens=100), BATCH)
    recomputed = gradient(build(tiny_models(family), tokens=100, recompute=True), BATCH)
    assert recomputed.equal(kept)


def test_recomputing_keeps_fewer_activations(tiny_models: Models) -> None:
    saved = {}
    for recompute in (False, True):
        passes = build(tiny_models(), tokens=10_000, recompute=recompute)
        parts = passes.plan(BATCH)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            passes.model.logprobs(parts[0], parts[0].trained, temperature=1.0)
        saved[recompute] = sum(sizes)
    assert saved[True] < saved[False] / 2


def test_bfloat16_compute_keeps_float32_gradients_near_the_exact_ones(tiny_models: Models) -> None:
    passes = build(tiny_models(), tokens=100, dtype="bfloat16")
    found = gradient(passes, BATCH)
    assert all(parameter.grad.dtype == torch.float32 for parameter in passes.model.predictor.parameters())
    assert apart(found, naive_gradient(tiny_models(), BATCH)) < 0.05


def test_rows_without_a_token_to_train_on_are_not_computed(tiny_models: Models) -> None:
    mask = BATCH.loss_mask.copy()
    mask[BATCH.offsets[2] : BATCH.offsets[5]] = False
    passes = build(tiny_models(), tokens=100)
    parts = passes.plan(replace(BATCH, loss_mask=mask))
    assert sum(part.input_ids.shape[0] for part in parts) == BATCH.rows - 3


def test_empty_rows_and_masked_first_tokens_train_nothing(tiny_models: Models) -> None:
    batch = Batch(
        token_ids=np.array([4, 5, 6]),
        offsets=np.array([0, 0, 1, 1, 3, 3]),
        loss_mask=np.array([True, True, False]),
        logprobs=np.zeros(3, np.float32),
        advantages=np.ones(3, np.float32),
        metrics={},
    )
    passes = build(tiny_models(), tokens=100)
    assert passes.plan(batch) == []
    found = log_probs(passes, batch)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] < 0


@pytest.mark.parametrize("tokens", [1, 60, 10_000])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_log_probs_are_those_of_each_row_alone(tiny_models: Models, family: str, tokens: int) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny_models(family), dtype=torch.float64)
    found = log_probs(build(tiny_models(family), tokens=tokens), BATCH)
    for start, end in zip(BATCH.offsets[:-1], BATCH.offsets[1:], strict=True):
        ids = torch.from_numpy(BATCH.token_ids[start:end])
        with torch.no_grad():
            logits = network(ids[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert found[start + 1 : end] == pytest.approx(expected.numpy(), abs=1e-5)


def test_passes_without_rows_add_nothing_to_the_gradient(tiny_models: Models) -> None:
    plain, padded = build(tiny_models(), tokens=100), build(tiny_models(), tokens=100)
    parts = padded.padded(padded.plan(BATCH), len(plain.plan(BATCH)) + 2)
    assert [len(part.trained) for part in parts[-2:]] == [0, 0]
    tallies = Tally(), Tally()
    counts = [
        passes.accumulate(given, [], LOSS, tally, temperature=1.0)[0]
        for passes, given, tally in zip((plain, padded), (parts[:-2], parts), tallies, strict=True)
    ]
    assert counts[0] == counts[1]
    for one, other in zip(plain.model.predictor.parameters(), padded.model.predictor.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.equal(other.grad)
    reports = [tally.metrics(Alone().gather) for tally in tallies]
    assert [report.pop("train/padding_fraction") for report in reports] == pytest.approx([0.198, 0.203], abs=0.001)
    assert reports[0] == pytest.approx(reports[1], rel=1e-7)
    assert (
        padded.log_probs(padded.padded(padded.plan_all(BATCH), 9), BATCH).tolist() == log_probs(plain, BATCH).tolist()
    )


def test_a_loss_that_is_a_constant_where_nothing_is_trained_on_still_goes_back_through_the_model(
    tiny_models: Models,
) -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(numerator=torch.zeros(()), count=0.0, sums={}) if not inputs.mask.any() else LOSS(inputs)

    passes = build(tiny_models(), tokens=100)
    assert passes.accumulate(passes.padded([], 1), [], loss, Tally(), temperature=1.0)[0] == 0.0
    assert all(not parameter.grad.any() for parameter in passes.model.predictor.parameters())
