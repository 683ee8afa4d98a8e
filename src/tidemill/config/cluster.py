"""Where the run's processes live."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug

__all__ = ["ClusterSettings", "InlineClusterSettings"]


class ClusterSettings(Plug):
    """What every cluster has."""

    use: Annotated[str, Field(min_length=1)] = "inline"
    """Which cluster: `inline`, an entry point in `tidemill.clusters`, or `module:Class` of a settings class."""


class InlineClusterSettings(ClusterSettings):
    """Everything in this process."""

    implementation: ClassVar[str] = "tidemill.cluster.inline:InlineCluster"
