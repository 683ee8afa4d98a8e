"""Where the run's processes live."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import NonNegative, Seconds

__all__ = ["ClusterSettings", "InlineClusterSettings", "RayClusterSettings"]


class ClusterSettings(Plug):
    """What every cluster has."""

    use: Annotated[str, Field(min_length=1)] = "inline"
    """Which cluster: `inline`, `ray`, an entry point in `tidemill.clusters`, or `module:Class` of a settings class."""


class InlineClusterSettings(ClusterSettings):
    """Everything in this process."""

    implementation: ClassVar[str] = "tidemill.cluster.inline:InlineCluster"


class RayClusterSettings(ClusterSettings):
    """A process for each trainer rank and each engine replica, on this machine or on several, by Ray."""

    implementation: ClassVar[str] = "tidemill.cluster.ray.cluster:RayCluster"
    requires: ClassVar[tuple[str, ...]] = ("ray",)
    extra: ClassVar[str] = "ray"

    address: Annotated[str, Field(pattern=r"^([^\s/]+:[0-9]{1,5})?$", examples=["10.0.0.1:6379"])] = ""
    """`host:port` of a Ray cluster to join; empty starts a private one on this machine, which ends with the run."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: trainer and engine take turns on the same GPUs. `separate`: the engine has GPUs of its own."""
    cpus: NonNegative = 0
    """CPU cores that Ray sets aside for each process; 0 sets none aside, which is right where nobody else computes."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a run an engine replica that died is started again, while others answer for it; 0 is never. A lone
    one that dies while it generates ends the run, for nobody else has its weights."""
    deadline: Seconds = 1800.0
    """Longest that a process may take for one call, such as an update or a rollout, before the run fails."""
