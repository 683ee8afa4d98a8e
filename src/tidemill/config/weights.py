"""How the hand-over of weights to the engine is checked."""

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import Settings

__all__ = ["WeightsSettings"]


class WeightsSettings(Settings):
    """How the hand-over of weights from trainer to engine is checked, before the engine answers from them."""

    verify: Literal["always", "sampled", "off"] = "always"
    """Which weights are compared by checksum, as the trainer has them and as they lie in the engine: all in each
    hand-over, some in turn (all of them in the first and after a failure), or none."""
    verify_within: Annotated[int, Field(ge=2, le=1000)] = 8
    """Hand-overs in a row within which `sampled` compares every weight once."""
