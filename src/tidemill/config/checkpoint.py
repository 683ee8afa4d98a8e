"""When a run is saved, what is kept, and what becomes of it at the end."""

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Interval, Names, Precision, Seconds

__all__ = ["BOUND_TO", "CheckpointSettings"]

BOUND_TO = ("model", "tokenizer", "data", "algorithm", "warm_up", "seed")
"""What a checkpoint is bound to: the names that `accept` takes."""


class CheckpointSettings(Settings):
    """Checkpoints. The state at the end, and when a signal stops the run, is saved whatever the interval."""

    every: Interval = 50
    """Save every so many steps; 0 saves only at the end and when the run is stopped."""
    mode: Literal["async", "sync"] = "async"
    """`async` writes while the run goes on, `sync` waits until the save is durable."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints to keep; at least one is always kept."""
    keep_every: Interval = 0
    """Keep every checkpoint whose step is a multiple of this for good; 0 keeps only the newest."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Whether a save that failed (a full disk, say) ends the run or is reported and tried again at the next."""
    grace: Seconds = 60.0
    """Longest wait for a save in flight when a signal stops the run."""
    walk_back: bool = True
    """On resume, take the next older checkpoint when the newest is damaged; false refuses to start instead."""
    accept: Names = ()
    """Changes since the checkpoint that a resume may accept, for example `["data"]`; others are refused. Names: model,
    tokenizer, data, algorithm, warm_up, seed."""
    export: bool = True
    """Write a folder that `transformers` loads at the end of the run."""
    export_dtype: Precision = "auto"
    """Precision of the exported weights; `auto` is that of the base model."""
