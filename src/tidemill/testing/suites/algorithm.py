"""What every loss and every algorithm must do. Subclass `LossSuite` or `AlgorithmSuite` and override its fixture."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.contracts.algorithm import Algorithm, Loss, LossInputs
from tidemill.contracts.sample import Group, Prompt, Score, ScoreStatus, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion

__all__ = ["AlgorithmSuite", "LossSuite", "loss_inputs", "make_group"]


def loss_inputs(*, rows: int = 3, tokens: int = 5, seed: int = 0) -> LossInputs:
    """Random inputs with a mask of about half; `logprobs` is a leaf that takes gradient."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=draw) < 0.5
    mask[0, 0] = True

    def masked(low: float, high: float) -> Tensor:
        return torch.where(mask, torch.rand(rows, tokens, generator=draw) * (high - low) + low, 0.0)

    return LossInputs(
        logprobs=masked(-3.0, -1.0).requires_grad_(),
        old_logprobs=masked(-3.0, -1.0),
        rollout_logprobs=masked(-3.0, -1.0),
        advantages=masked(-1.0, 1.0),
        mask=mask,
    )


def _evaluate(loss: Loss, inputs: LossInputs) -> tuple[float, float, Tensor]:
    leaf = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=leaf))
    output.numerator.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(output.numerator.detach()), output.count, leaf.grad


class LossSuite:
    """A loss is a pure function of one micro-batch: a numerator, a count, and sums for metrics."""

    @pytest.fixture
    def loss(self) -> Loss:
        """Override: the loss."""
        raise NotImplementedError("override the fixture `loss`")

    def test_parts_of_a_batch_add_up_to_the_whole(self, loss: Loss) -> None:
        whole = loss_inputs(rows=4)
        parts = [
            LossInputs(**{name: value.detach()[rows] for name, value in vars(whole).items()})
            for rows in (slice(0, 1), slice(1, 4))
        ]
        numerator, count, gradient = _evaluate(loss, whole)
        found = [_evaluate(loss, part) for part in parts]
        assert sum(part[0] for part in found) == pytest.approx(numerator, rel=1e-5, abs=1e-6)
        assert sum(part[1] for part in found) == count
        torch.testing.assert_close(torch.cat([part[2] for part in found]), gradient)

    def test_padding_changes_nothing(self, loss: Loss) -> None:
        inputs = loss_inputs()
        padded = LossInputs(
            **{name: torch.nn.functional.pad(value.detach(), (0, 7)) for name, value in vars(inputs).items()}
        )
        numerator, count, gradient = _evaluate(loss, inputs)
        wide = _evaluate(loss, padded)
        assert wide[0] == pytest.approx(numerator, rel=1e-5, abs=1e-6)
        assert wide[1] == count
        torch.testing.assert_close(wide[2][:, : gradient.shape[1]], gradient)
        assert not wide[2][:, gradient.shape[1] :].any()

    @pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_masked_out_changes_nothing_even_if_not_a_number(self, loss: Loss, garbage: float) -> None:
        inputs = loss_inputs()
        expected = _evaluate(loss, inputs)
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages"):
            value = torch.where(inputs.mask, vars(inputs)[name].detach(), garbage)
            numerator, count, gradient = _evaluate(loss, replace(inputs, **{name: value}))
            assert (numerator, count) == expected[:2]
            assert gradient.equal(expected[2])

    @pytest.mark.parametrize("difference", [-100.0, 100.0, 1000.0])
    def test_far_apart_policies_give_finite_losses(self, loss: Loss, difference: float) -> None:
        inputs = loss_inputs()
        moved = inputs.logprobs.detach().clone()
        moved[0, 0] += difference
        numerator, _, gradient = _evaluate(loss, replace(inputs, logprobs=moved))
        assert np.isfinite(numerator)
        assert gradient.isfinite().all()

    def test_a_mask_of_nothing_gives_zero_of_zero(self, loss: Loss) -> None:
        inputs = loss_inputs()
        numerator, count, gradient = _evaluate(loss, replace(inputs, mask=torch.zeros_like(inputs.mask)))
        assert (numerator, count) == (0.0, 0.0)
        assert not gradient.any()

    def test_sums_are_finite_scalars_without_gradient(self, loss: Loss) -> None:
        output = loss(loss_inputs())
        for name, value in output.sums.items():
            assert value.shape == (), name
            assert value.isfinite(), name
            assert not value.requires_grad, name


def make_group(*rewards: float | None, prompt: str = "a", stop_reason: StopReason = StopReason.EOS) -> Group:
    """Answers of one to three tokens to a prompt of two, one a reward; None is an answer whose reward failed."""
    asked = Prompt(id=prompt, key=f"0:{prompt}", token_ids=(5, 6), text=prompt)
    answers = []
    for sample, reward in enumerate(rewards):
        length = 1 + sample % 3
        status = ScoreStatus.FAILED if reward is None else ScoreStatus.SCORED
        answers.append(
            Trajectory(
                prompt=asked,
                sample=sample,
                token_ids=tuple(range(10, 10 + length)),
                logprobs=(-1.5,) * length,
                loss_mask=(True,) * length,
                version=PolicyVersion(0, 0),
                stop_reason=stop_reason,
                score=Score(value=reward, status=status),
            )
        )
    return Group(prompt=asked, trajectories=tuple(answers))


class AlgorithmSuite(LossSuite):
    """An algorithm turns scored groups into a batch with a row for each answer."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        """Override: the algorithm."""
        raise NotImplementedError("override the fixture `algorithm`")

    @pytest.fixture
    def loss(self, algorithm: Algorithm) -> Loss:
        """The algorithm's."""
        return algorithm.loss

    def test_every_answer_is_a_row_of_the_very_ids_that_were_sampled(self, algorithm: Algorithm) -> None:
        groups = [make_group(0.0, 1.0), make_group(1.0, None, 0.5, prompt="b")]
        batch = algorithm.batch(groups)
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        assert batch.rows == len(answers)
        for row, answer in enumerate(answers):
            ids = batch.token_ids[batch.offsets[row] : batch.offsets[row + 1]]
            assert tuple(ids) == answer.prompt.token_ids + answer.token_ids

    def test_prompts_are_never_trained_on_and_sampled_tokens_keep_their_log_probs(self, algorithm: Algorithm) -> None:
        batch = algorithm.batch([make_group(0.0, 1.0, 1.0)])
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            assert not batch.loss_mask[start : start + 2].any()
            assert batch.loss_mask[start + 2 : end].all()
            assert (batch.logprobs[start + 2 : end] == np.float32(-1.5)).all()
        assert (batch.logprobs[~batch.loss_mask] == 0).all()

    @pytest.mark.parametrize(
        "groups",
        [
            [],
            [make_group(0.0, 0.0)],
            [make_group(None, None)],
            [make_group(1.0, None)],
            [make_group(1e30, -1e30, 0.0)],
            [make_group(1.0, 0.0, stop_reason=StopReason.FAILED)],
        ],
        ids=["none", "equal", "all failed", "one valid", "huge", "failed episodes"],
    )
    def test_groups_that_teach_nothing_give_finite_batches(self, algorithm: Algorithm, groups: list[Group]) -> None:
        batch = algorithm.batch(groups)
        assert batch.rows == sum(len(group.trajectories) for group in groups)
        for array in (batch.advantages, batch.logprobs, np.array(list(batch.metrics.values()))):
            assert np.isfinite(array).all()

    def test_a_failed_answer_is_kept_as_a_row_without_a_token_to_train_on(self, algorithm: Algorithm) -> None:
        batch = algorithm.batch([make_group(1.0, None, 0.0)])
        assert not batch.loss_mask[batch.offsets[1] : batch.offsets[2]].any()
        assert batch.loss_mask[batch.offsets[0] : batch.offsets[1]].any()
