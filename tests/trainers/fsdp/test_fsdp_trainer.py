"""tidemill.trainers.fsdp.trainer"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill import faults
from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.algorithms.sft import Sft
from tidemill.contracts.algorithm import Loss, LossInputs, LossOutput
from tidemill.contracts.batch import Batch
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.events import Event, Notice, PhaseDone
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency, Tenant
from tidemill.errors import CheckpointError, ResidencyError, TrainerError
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.suites.trainer import MakeTrainer, TrainerSuite, awake, copied, ragged_batch, same
from tidemill.trainers.fsdp.trainer import FsdpTrainer

MakeFsdpTrainer = Callable[..., FsdpTrainer]
CLIP = ClipLoss(low=0.2, high=0.2)


class TestFsdpTrainer(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, make_fsdp_trainer: MakeFsdpTrainer) -> MakeTrainer:
        return make_fsdp_trainer

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


class TestFsdpTrainerWithMinibatchesOfAnUntiedBfloat16Llama(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, make_fsdp_trainer: MakeFsdpTrainer, tiny_models: Callable[..., Path]) -> MakeTrainer:
        return lambda: make_fsdp_trainer(
            model=tiny_models("llama", False), compute_dtype="bfloat16", minibatches=2, recompute=True
        )

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


class TestFsdpTrainerOfAMixtureOfExperts(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, make_fsdp_trainer: MakeFsdpTrainer, tiny_models: Callable[..., Path]) -> MakeTrainer:
        return lambda: make_fsdp_trainer(model=tiny_models("qwen3_moe"), minibatches=2, recompute=True)

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


class TestFsdpTrainerAsATenant(TenantSuite):
    @pytest.fixture
    def tenant(self, make_fsdp_trainer: MakeFsdpTrainer) -> Tenant:
        return make_fsdp_trainer()

    def use(self, tenant: Tenant, residency: Residency) -> None:
        assert isinstance(tenant, FsdpTrainer)
        tenant.begin("rl")
        tenant.step(ragged_batch(), CLIP)


def state(trainer: FsdpTrainer) -> Saved:
    with awake(trainer):
        snapshot = trainer.snapshot()
    saved = copied(snapshot)
    snapshot.release()
    return saved


def with_own_logprobs(trainer: FsdpTrainer, batch: Batch) -> Batch:
    """The batch as if an engine with exactly the trainer's weights had sampled it."""
    found = np.where(batch.loss_mask, trainer.log_probs(batch), 0).astype(np.float32)
    return replace(batch, logprobs=found)


def test_a_step_is_that_of_the_plain_loop_it_replaces(
    make_fsdp_trainer: MakeFsdpTrainer, tiny_models: Callable[..., Path]
) -> None:
    trainer = make_fsdp_trainer()
    network = AutoModelForCausalLM.from_pretrained(tiny_models(), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3 / 3, betas=(0.9, 0.95), weight_decay=0.01)
    with awake(trainer):
        trainer.begin("rl")
        batch = with_own_logprobs(trainer, ragged_batch(rows=8))
        numerator, count = torch.zeros(()), 0
        for row in range(batch.rows):
            span = slice(batch.offsets[row], batch.offsets[row + 1])
            ids, mask = torch.from_numpy(batch.token_ids[span]), torch.from_numpy(batch.loss_mask[span])[1:]
            logprobs = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            ratio = (logprobs - torch.from_numpy(batch.logprobs[span])[1:]).exp()
            advantages = torch.from_numpy(batch.advantages[span])[1:]
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            numerator, count = numerator - objective[mask].sum(), count + int(mask.sum())
        (numerator / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        report = trainer.step(batch, CLIP)
        expected = dict(network.named_parameters())
        for name, tensor in trainer.named_weights():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-5)
    assert report.metrics["policy/loss"] == pytest.approx(float(numerator.detach() / count), rel=1e-4)
    assert report.metrics["policy/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert np.abs(report.logprobs - batch.logprobs).max() < 3e-6


@pytest.mark.parametrize("tokens", [1, 13, 40, 10_000])
def test_micro_batches_of_any_size_report_the_same_numbers(make_fsdp_trainer: MakeFsdpTrainer, tokens: int) -> None:
    reports = []
    for size in (tokens, 100_000):
        trainer = make_fsdp_trainer(tokens_per_micro_batch=size)
        with awake(trainer):
            trainer.begin("rl")
            reports.append(dict(trainer.step(ragged_batch(rows=12, longest=40), CLIP).metrics))
    for report in reports:
        report.pop("train/padding_fraction")
    assert reports[0] == pytest.approx(reports[1], rel=1e-5, abs=1e-6)


def test_one_minibatch_has_ratio_one_and_two_at_a_large_rate_do_not(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    found = {}
    for count in (1, 2):
        trainer = make_fsdp_trainer(minibatches=count)
        with awake(trainer):
            trainer.begin("warm_up")
            for seed in range(3):
                found[count] = trainer.step(ragged_batch(seed=seed, rows=8), ClipLoss(low=0.01, high=0.01)).metrics
    assert found[1]["policy/ratio"] == 1.0
    assert found[1]["policy/clip_fraction"] == found[1]["policy/kl"] == 0.0
    assert found[2]["policy/ratio"] != 1.0
    assert found[2]["policy/clip_fraction"] > 0.0
    assert found[2]["policy/kl"] > 0.0


def test_every_minibatch_compares_with_the_weights_before_the_first(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer(minibatches=3, tokens_per_micro_batch=20)
    seen: list[LossInputs] = []

    def remember(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return CLIP(inputs)

    batch = ragged_batch(rows=6)
    with awake(trainer):
        trainer.begin("warm_up")
        before = trainer.log_probs(batch)[batch.loss_mask]
        trainer.step(batch, remember)
        assert not np.allclose(trainer.log_probs(batch)[batch.loss_mask], before, atol=1e-4)
    old = torch.cat([inputs.old_logprobs[inputs.mask] for inputs in seen]).numpy()
    assert np.sort(old) == pytest.approx(np.sort(before), abs=2e-6)
    assert seen[0].logprobs.detach().equal(seen[0].old_logprobs)


def test_rows_that_do_not_divide_into_minibatches_are_refused_before_anything_changes(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    trainer = make_fsdp_trainer(minibatches=4)
    with awake(trainer):
        trainer.begin("rl")
    before = state(trainer)
    with awake(trainer), pytest.raises(TrainerError, match=r"6 rows into 4 .* trainer\.minibatches"):
        trainer.step(ragged_batch(rows=6), CLIP)
    assert same(state(trainer), before)


def test_a_batch_of_no_rows_is_no_update_and_no_error(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    for count in (1, 2):
        trainer = make_fsdp_trainer(minibatches=count)
        with awake(trainer):
            trainer.begin("rl")
            report = trainer.step(Sft().batch([]), CrossEntropyLoss())
        assert report.skipped == "no token was left to train on"
        assert report.metrics["policy/updates_empty"] == count


@pytest.mark.parametrize("garbage", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    make_fsdp_trainer: MakeFsdpTrainer, garbage: float
) -> None:
    trainer, batch = make_fsdp_trainer(), ragged_batch()
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(batch, CLIP)
    before = state(trainer)
    advantages = np.where(batch.loss_mask, np.float32(garbage), np.float32(0))
    with awake(trainer):
        report = trainer.step(replace(batch, advantages=advantages), CLIP)
    after = state(trainer)
    assert report.skipped == "the gradient was not finite"
    assert report.metrics["policy/updates_skipped"] == 1.0
    assert np.isfinite(list(report.metrics.values())).all()
    assert same(Saved(tensors=after.tensors, extra=before.extra), before)
    assert (after.extra["updates"], after.extra["optimizer_steps"]) == (2, 1)


def test_one_minibatch_skipped_does_not_stop_the_others(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer, batch = make_fsdp_trainer(minibatches=2), ragged_batch(rows=4)
    advantages = batch.advantages.copy()
    advantages[: batch.offsets[2]][batch.loss_mask[: batch.offsets[2]]] = np.inf
    with awake(trainer):
        trainer.begin("rl")
        report = trainer.step(replace(batch, advantages=advantages), CLIP)
        assert all(tensor.isfinite().all() for _, tensor in trainer.named_weights())
    assert not report.skipped
    assert report.metrics["policy/updates_skipped"] == 1.0


def test_garbage_at_places_that_are_masked_out_changes_no_bit(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    batch = ragged_batch()
    dirty = replace(
        batch,
        logprobs=np.where(batch.loss_mask, batch.logprobs, np.float32(np.nan)),
        advantages=np.where(batch.loss_mask, batch.advantages, np.float32(np.inf)),
    )
    states = []
    for given in (batch, dirty):
        trainer = make_fsdp_trainer()
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(given, CLIP)
        states.append(state(trainer))
    assert same(*states)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_tells_the_log_probs_before_its_first_update(
    make_fsdp_trainer: MakeFsdpTrainer, minibatches: int
) -> None:
    trainer, batch = make_fsdp_trainer(minibatches=minibatches), ragged_batch(rows=6)
    with awake(trainer):
        trainer.begin("rl")
        own = with_own_logprobs(trainer, batch).logprobs
        found = trainer.step(batch, CLIP).logprobs
        changed = with_own_logprobs(trainer, batch).logprobs
    assert found.dtype == np.float32
    assert np.abs(found - own).max() < 1e-6 < np.abs(found - changed).max()
    assert not found[~batch.loss_mask].any()


def test_supervised_steps_learn(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer, batch = make_fsdp_trainer(), Sft().batch([([5, 6], [7, 8, 9]), ([6], [5, 2])])
    with awake(trainer):
        trainer.begin("warm_up")
        reports = [trainer.step(batch, CrossEntropyLoss()).metrics for _ in range(30)]
    assert reports[-1]["policy/loss"] < 0.7 * reports[0]["policy/loss"]
    assert reports[0]["policy/nll"] == pytest.approx(reports[0]["policy/loss"])


def test_rewarded_answers_become_likelier_and_others_less_likely(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer, batch = make_fsdp_trainer(), ragged_batch(rows=8)
    with awake(trainer):
        trainer.begin("warm_up")
        before = trainer.log_probs(batch)
        for _ in range(5):
            trainer.step(batch, CLIP)
        change = trainer.log_probs(batch) - before
    assert change[batch.advantages > 0.5].mean() > 0 > change[batch.advantages < -0.5].mean()


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_probs_are_at_the_temperature_of_the_batch(make_fsdp_trainer: MakeFsdpTrainer, temperature: float) -> None:
    trainer, batch = make_fsdp_trainer(), replace(ragged_batch(), temperature=temperature)
    with awake(trainer):
        trainer.begin("rl")
        own = with_own_logprobs(trainer, batch)
        assert np.abs(trainer.step(own, CLIP).logprobs - own.logprobs).max() < 1e-5


def test_the_learning_rate_after_a_resume_is_that_of_a_run_never_stopped(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    whole, stopped, resumed = make_fsdp_trainer(), make_fsdp_trainer(), make_fsdp_trainer()

    def steps(trainer: FsdpTrainer, count: int) -> list[float]:
        with awake(trainer):
            trainer.begin("rl")
            return [trainer.step(ragged_batch(), CLIP).metrics["policy/lr"] for _ in range(count)]

    expected = steps(whole, 10)
    first = steps(stopped, 4)
    saved = state(stopped)
    with awake(resumed):
        resumed.load(saved)
    assert first + steps(resumed, 6) == expected
    assert expected[:4] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert expected[4] > expected[9] > 1e-4
    assert same(state(resumed), state(whole))


def test_a_changed_total_bends_the_curve_from_the_next_step_on_and_says_so(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    events: list[Event] = []
    stopped = make_fsdp_trainer()
    longer = replace(stopped._phases["rl"], total_steps=20)
    resumed = make_fsdp_trainer(phases={"rl": longer}, emit=events.append)
    with awake(stopped):
        stopped.begin("rl")
        for _ in range(4):
            stopped.step(ragged_batch(), CLIP)
    with awake(resumed):
        resumed.load(state(stopped))
        rate = resumed.step(ragged_batch(), CLIP).metrics["policy/lr"]
    assert rate == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 17)) / 2))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == 1
    assert "20" in notices[0]
    assert "10" in notices[0]


def test_a_checkpoint_without_optimizer_state_is_refused_and_says_why(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()
    saved = state(trainer)
    weights = {name: tensor for name, tensor in saved.tensors.items() if not name.startswith("optimizer/")}
    with awake(trainer), pytest.raises(CheckpointError, match="start afresh in silence"):
        trainer.load(Saved(tensors=weights, extra=saved.extra))


@pytest.mark.parametrize(
    "extra",
    [{}, {"phase": "rl", "updates": -1, "optimizer_steps": 0}, {"phase": "other", "updates": 1, "optimizer_steps": 1}],
)
def test_counts_that_are_missing_or_impossible_are_refused(
    make_fsdp_trainer: MakeFsdpTrainer, extra: dict[str, Any]
) -> None:
    trainer = make_fsdp_trainer()
    saved = state(trainer)
    with awake(trainer), pytest.raises(CheckpointError):
        trainer.load(Saved(tensors=saved.tensors, extra=extra))
    assert same(state(trainer), saved)


def test_a_state_of_another_model_is_refused(
    make_fsdp_trainer: MakeFsdpTrainer, tiny_models: Callable[..., Path]
) -> None:
    trainer, other = make_fsdp_trainer(), make_fsdp_trainer(model=tiny_models("llama"))
    before = state(trainer)
    with awake(trainer), pytest.raises(CheckpointError):
        trainer.load(state(other))
    assert same(state(trainer), before)


def test_sleep_is_refused_within_a_step(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()

    def falls_asleep(inputs: LossInputs) -> LossOutput:
        trainer.sleep()
        return CLIP(inputs)

    with awake(trainer):
        trainer.begin("rl")
        with pytest.raises(ResidencyError, match="step is under way"):
            trainer.step(ragged_batch(), falls_asleep)
        assert not trainer.step(ragged_batch(), CLIP).skipped


def test_a_failure_before_the_first_update_leaves_a_usable_trainer(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()

    def fails(inputs: LossInputs) -> LossOutput:
        raise RuntimeError("out of memory")

    with awake(trainer):
        trainer.begin("rl")
    before = state(trainer)
    with awake(trainer), pytest.raises(RuntimeError):
        trainer.step(ragged_batch(), fails)
    assert same(state(trainer), before)
    with awake(trainer):
        assert not trainer.step(ragged_batch(), CLIP).skipped


def test_a_failure_between_two_updates_leaves_nothing_that_could_be_saved(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer(minibatches=2)
    with awake(trainer):
        trainer.begin("rl")
    good = state(trainer)
    with awake(trainer):
        with faults.armed("trainer.update=raise@2"), pytest.raises(faults.FaultInjected):
            trainer.step(ragged_batch(), CLIP)
        for use in (trainer.snapshot, lambda: trainer.step(ragged_batch(), CLIP), lambda: trainer.begin("warm_up")):
            with pytest.raises(TrainerError, match="load a checkpoint"):
                use()
        trainer.load(good)
    assert same(state(trainer), good)


def test_gradients_are_gone_after_a_step(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
    assert all(parameter.grad is None for parameter in trainer._parameters.values())


def test_a_changed_trainer_asleep_cannot_be_snapshot_without_its_pages(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()
    with pytest.raises(ResidencyError):
        trainer.snapshot()  # awake, never captured, and without a lease


def test_tied_weights_are_named_and_saved_once(
    make_fsdp_trainer: MakeFsdpTrainer, tiny_models: Callable[..., Path]
) -> None:
    for tied, expected in ((True, False), (False, True)):
        trainer = make_fsdp_trainer(model=tiny_models("qwen3", tied))
        with awake(trainer):
            names = {name for name, _ in trainer.named_weights()}
        assert "model.embed_tokens.weight" in names
        assert ("lm_head.weight" in names) is expected
        saved = state(trainer).tensors
        assert ("model/lm_head.weight" in saved) is expected
        assert {name for name in saved if name.startswith("optimizer/exp_avg/")} == {
            f"optimizer/exp_avg/{name}" for name in names
        }


def test_parts_are_counted_in_bytes_of_float32(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()
    with awake(trainer):
        weights = sum(4 * tensor.numel() for _, tensor in trainer.named_weights())
    assert trainer.footprint(Part.GRADS) == weights
    assert weights <= trainer.footprint(Part.WEIGHTS) < 1.5 * weights
    assert 2 * weights <= trainer.footprint(Part.OPTIMIZER) < 3 * weights
    assert trainer.footprint(Part.KV_CACHE) == 0
    assert trainer.footprint(Part.ALL) == sum(trainer.footprint(part) for part in Part.ALL)


def test_weights_alone_can_be_woken_to_hand_them_out(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer()
    trainer.sleep()
    assert trainer.host_bytes() >= trainer.footprint(Part.WEIGHTS | Part.OPTIMIZER)
    trainer.wake_up(Part.WEIGHTS)
    assert trainer.resident() == Part.WEIGHTS
    trainer.gate.open(Part.WEIGHTS)
    assert all(tensor.isfinite().all() for _, tensor in trainer.named_weights())
    with pytest.raises(ResidencyError):
        trainer.step(ragged_batch(), CLIP)


def test_training_is_timed(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    events: list[Event] = []
    trainer = make_fsdp_trainer(emit=events.append)
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
    phases = [event for event in events if isinstance(event, PhaseDone)]
    assert [(phase.name, phase.owner) for phase in phases] == [("train", "trainer")]


def test_tokens_of_another_vocabulary_are_refused(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer, batch = make_fsdp_trainer(), ragged_batch()
    for wrong in (-1, 10_000):
        ids = batch.token_ids.copy()
        ids[3] = wrong
        with awake(trainer):
            trainer.begin("rl")
            with pytest.raises(TrainerError, match=str(wrong)):
                trainer.step(replace(batch, token_ids=ids), CLIP)


def test_padding_is_measured(make_fsdp_trainer: MakeFsdpTrainer) -> None:
    trainer = make_fsdp_trainer(tokens_per_micro_batch=1000)
    batch = Sft().batch([([5], [6]), ([5, 6, 7], [8, 9])])
    with awake(trainer):
        trainer.begin("warm_up")
        metrics = trainer.step(batch, CrossEntropyLoss()).metrics
    assert metrics["train/tokens"] == 5.0  # the last token of a row is predicted but not fed in
    assert metrics["train/padding_fraction"] == pytest.approx(3 / 8)


def test_state_born_after_the_start_is_refused_at_the_next_sleep_for_it_would_not_survive(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    trainer = make_fsdp_trainer()
    trainer._network.register_buffer("late", torch.zeros(3))
    with pytest.raises(ResidencyError, match=r"1 tensors are not in it \['buffer/late'\]"):
        trainer.sleep()
    assert Part.WEIGHTS | Part.OPTIMIZER in trainer.resident()
