"""When a run is saved, what is kept, and what becomes of it at the end."""

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Interval, Names, Precision, Seconds

__all__ = ["ACCEPTABLE", "BOUND_TO", "CheckpointSettings"]

BOUND_TO = ("model", "tokenizer", "data", "algorithm", "warm_up", "seed")
"""What a checkpoint is bound to."""

ACCEPTABLE = (*BOUND_TO, "optimizer")
"""The names that `accept` takes."""


class CheckpointSettings(Settings):
    """Checkpoints. The state at the end, and when a signal stops the run, is saved whatever the interval."""

    every: Interval = 50
    """Save every so many steps; 0 saves only at the end and when the run is stopped."""
    at_epoch_end: bool = False
    """Save where an epoch of the prompts, or of the demonstrations of a warm-up, ends, too. A step that reaches over
    the end is the one that is saved."""
    mode: Literal["async", "sync"] = "async"
    """`async` writes while the run goes on, `sync` waits until the save is durable."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints to keep; at least one is always kept."""
    keep_every: Interval = 0
    """Keep every checkpoint whose step is a multiple of this for good; 0 keeps only the newest."""
    keep_best: str = ""
    """Keep the best checkpoint, too, by a number in metrics.jsonl that was recorded with its weights, for example
    `"eval/reward"`: the greatest is best, `"-eval/tokens_mean"` takes the smallest. Empty keeps none for it."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Whether a save or an export that failed (a full disk, say) ends the run or is reported and tried again at the
    next."""
    grace: Seconds = 60.0
    """Longest wait for a save in flight when a signal stops the run."""
    walk_back: bool = True
    """On resume, take the next older checkpoint when the newest is damaged; false refuses to start instead."""
    accept: Names = ()
    """Changes since the checkpoint that a resume may accept, for example `["data"]`; others are refused. Names: model,
    tokenizer, data, algorithm, warm_up, seed; and optimizer, which takes a checkpoint without the optimizer's state and
    begins a fresh one."""
    export: bool = True
    """Write a folder that `transformers` loads at the end of the run."""
    export_every: Interval = 0
    """Write such a folder beside the saves of the steps that are multiples of this, too, so it must be a multiple of
    `every`; 0 writes none. They are kept for good."""
    export_dtype: Precision = "auto"
    """Precision of the exported weights; `auto` is that of the base model."""
    trial: bool = True
    """Before the first step write a save and an export in small, read them back and remove them, so that what cannot be
    saved or exported is found then."""
