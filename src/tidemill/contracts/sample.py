"""What was asked, what was answered, what it was worth.

Token truth: a `Trajectory` carries the very ids that the engine sampled, each with its log-probability and mask. Text
is for rewards and people; nothing is ever tokenized again for training.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.contracts.state import PolicyVersion

__all__ = ["Group", "Prompt", "Score", "ScoreStatus", "StopReason", "Trajectory"]


class StopReason(enum.StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    STOP = "stop"  # a stop string
    LENGTH = "length"  # the limit on new tokens
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question, tokenized once.

    `id` names the row of the data set; `key` names this occurrence of it (epoch and id) and seeds its samples.
    """

    id: str
    key: str
    token_ids: tuple[int, ...]
    text: str
    label: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class ScoreStatus(enum.StrEnum):
    """Whether a reward is a number, a decision not to give one, or a failure."""

    SCORED = "scored"
    ABSTAINED = "abstained"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Reward of one trajectory; `value` is finite if and only if the status is SCORED."""

    value: float | None
    status: ScoreStatus = ScoreStatus.SCORED
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One answer. `token_ids`, `logprobs` and `loss_mask` have one length: that of the answer, prompt excluded.

    `logprobs` are the engine's, in nats, at the sampling temperature; where `loss_mask` is False (text that the
    environment inserted) they are 0.0. `version` names the weights that sampled it; `score` is None until rewarded.
    """

    prompt: Prompt
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    version: PolicyVersion
    stop_reason: StopReason
    text: str = ""
    score: Score | None = None
    routed_experts: Any = None
    multimodal: Any = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.loss_mask)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, logprobs and loss_mask of {self.id} differ in length: {sorted(lengths)}")

    @property
    def id(self) -> str:
        """`epoch:row#sample`, unique within a run."""
        return f"{self.prompt.key}#{self.sample}"

    @property
    def reward(self) -> float | None:
        """The finite reward, or None when abstained, failed or not yet scored."""
        return self.score.value if self.score is not None else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """All answers to one prompt, in order of `sample`."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
