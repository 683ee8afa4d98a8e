"""What to learn from the answers of a step."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import NonNegative

__all__ = ["AlgorithmSettings", "GrpoSettings"]


class AlgorithmSettings(Plug):
    """What every algorithm has."""

    least_samples: ClassVar[int] = 1
    """Answers to one prompt below which the algorithm learns nothing."""

    use: Annotated[str, Field(min_length=1)] = "grpo"
    """Which algorithm: `grpo`, an entry point in `tidemill.algorithms`, or `module:Class` of a settings class."""


class GrpoSettings(AlgorithmSettings):
    """Group-relative policy optimisation: an answer's advantage is its reward compared with its group's.

    Source: Shao et al. 2024, arXiv:2402.03300; the two clip bounds: Yu et al. 2025, arXiv:2503.14476.
    """

    implementation: ClassVar[str] = "tidemill.algorithms.grpo:Grpo"
    least_samples: ClassVar[int] = 2

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """How far below 1 the ratio of new to old probability may fall before it is clipped."""
    clip_high: NonNegative = 0.2
    """How far above 1 the ratio of new to old probability may rise before it is clipped."""
    normalize_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
