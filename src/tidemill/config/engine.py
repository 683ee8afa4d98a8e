"""The rollout engine: who turns prompts into answers."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import Count, Offload, Precision

__all__ = ["EngineSettings", "TransformersEngineSettings"]


class EngineSettings(Plug):
    """What every engine has."""

    use: Annotated[str, Field(min_length=1)] = "transformers"
    """Which engine: `transformers`, an entry point in `tidemill.engines`, or `module:Class` of a settings class."""
    dtype: Precision = "auto"
    """Precision of the engine's weights. `auto` is bfloat16 on a GPU and float32 on a CPU."""
    max_batch: Count = 64
    """Most answers generated at once."""
    offload: Offload = "auto"
    """Whether the engine sleeps while the trainer works; `auto` follows `residency.offload`."""


class TransformersEngineSettings(EngineSettings):
    """A batched loop of our own over a `transformers` model."""

    implementation: ClassVar[str] = "tidemill.engines.transformers.engine:TransformersEngine"
