"""GRPO: group advantages, clipped objective, mean over tokens; no critic and no reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.algorithms.advantages.group import group_advantages
from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.algorithms.pack import Row, pack
from tidemill.contracts.batch import Batch
from tidemill.contracts.sample import Group, StopReason, Trajectory
from tidemill.errors import ConfigError, EnvironmentFailure

__all__ = ["Grpo"]


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """Answers better than their group become likelier. `temperature` is the one at which they were sampled.

    Source: Shao et al. 2024, arXiv:2402.03300; without the KL term; token mean as in Yu et al. 2025, arXiv:2503.14476.
    """

    clip_low: float
    clip_high: float
    normalize_std: bool
    temperature: float

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"cannot train on greedy answers: rollout.sampling.temperature is {self.temperature:g}, at which all "
                "answers to a prompt are the same; set it above 0"
            )

    @property
    def loss(self) -> ClipLoss:
        """The clipped objective at this bundle's bounds."""
        return ClipLoss(low=self.clip_low, high=self.clip_high)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """All trajectories in order. Those that failed or have no reward stay as rows without a token to train on.

        A group that teaches nothing keeps its tokens, at advantage 0: it counts in the mean. Metrics: groups without
        signal, rows left out, and mean magnitude and extremes of the advantages of the rows trained on.
        """
        rows: list[Row] = []
        trained: list[float] = []
        without_signal = left_out = 0
        for group in groups:
            rewards = [_usable_reward(trajectory) for trajectory in group.trajectories]
            advantages = group_advantages(rewards, normalize_std=self.normalize_std)
            without_signal += not advantages.signal
            for trajectory, advantage in zip(group.trajectories, advantages.values, strict=True):
                rows.append(_row(trajectory, advantage))
                left_out += advantage is None
                trained.extend([] if advantage is None else [advantage])
        metrics = {
            "rollout/groups_without_signal": float(without_signal),
            "rollout/rows_left_out": float(left_out),
            "advantage/abs_mean": math.fsum(map(abs, trained)) / max(len(trained), 1),
            "advantage/min": min(trained, default=0.0),
            "advantage/max": max(trained, default=0.0),
        }
        return pack(rows, temperature=self.temperature, metrics=metrics)


def _usable_reward(trajectory: Trajectory) -> float | None:
    """The reward, or None when the answer must not be trained on."""
    if trajectory.routed_experts is not None or trajectory.multimodal is not None:
        raise EnvironmentFailure(
            f"cannot train on {trajectory.id}: it carries routed experts or multimodal inputs, which algorithm.use = "
            '"grpo" does not pass on to the trainer; use an environment that returns token ids alone'
        )
    if trajectory.stop_reason in (StopReason.FAILED, StopReason.ABORTED):
        return None
    if not all(map(math.isfinite, trajectory.logprobs)):
        return None
    return trajectory.reward


def _row(trajectory: Trajectory, advantage: float | None) -> Row:
    usable = advantage is not None
    return Row(
        prompt_ids=trajectory.prompt.token_ids,
        answer_ids=trajectory.token_ids,
        logprobs=trajectory.logprobs,
        mask=trajectory.loss_mask if usable else [False] * len(trajectory.token_ids),
        advantage=advantage if advantage is not None else 0.0,
    )
