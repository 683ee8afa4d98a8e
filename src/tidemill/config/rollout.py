"""What is sampled in a step."""

from typing import Annotated

from pydantic import Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Count, Label, MismatchLimit, NonNegative, OptionalPath, Texts, TokenIds

__all__ = ["RolloutSettings", "SamplingSettings"]


class SamplingSettings(Settings):
    """How answers are sampled."""

    temperature: NonNegative = 1.0
    """Divides the logits. 0 is greedy, which is refused for training: it explores nothing."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that hold this probability; training needs 1."""
    top_k: Annotated[int, Field(ge=0), Label("tokens, 0 for all")] = 0
    """Sample from this many likeliest tokens, 0 for all; training needs 0."""
    max_new_tokens: Count = 256
    """Longest answer in tokens."""
    stop: Texts = ()
    """Texts that end an answer."""
    stop_token_ids: TokenIds = ()
    """Token ids that end an answer, besides the model's own."""


class RolloutSettings(Settings):
    """Prompts and answers of one step."""

    prompts: Count = 8
    """Prompts in one step."""
    samples: Count = 8
    """Answers to each prompt; a group method needs two or more."""
    dump: bool = False
    """Keep every answer with its log-probabilities, advantage and reward in `rollouts/` of the run folder."""
    replay: OptionalPath = None
    """Folder of dumped rollouts to train on instead of generating, made with the same `rollout.samples` and sampling
    temperature; no engine is built."""
    max_mismatch: MismatchLimit = "auto"
    """Most that log-probs of engine and trainer may differ in the mean, in nats. Beyond it a run refuses to start
    learning, and a later step warns. `auto` is 0.1, and with both in float32 what the engine's kernels explain; `off`
    checks nothing."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are sampled in training and by `tidemill rollout`."""
