"""How an episode is played."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug

__all__ = ["EnvironmentSettings", "SingleTurnSettings"]


class EnvironmentSettings(Plug):
    """What every environment has."""

    use: Annotated[str, Field(min_length=1)] = "single_turn"
    """Which environment: `single_turn`, or an entry point in `tidemill.environments`."""


class SingleTurnSettings(EnvironmentSettings):
    """One prompt, one answer."""

    implementation: ClassVar[str] = "tidemill.environments.single_turn:SingleTurn"
