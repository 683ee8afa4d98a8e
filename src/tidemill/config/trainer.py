"""The trainer: who owns parameters and optimizer, and how one update is made."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import Count, NonNegative, Offload, Precision
from tidemill.config.optimizer import OptimizerSettings, ScheduleSettings

__all__ = ["FsdpTrainerSettings", "TrainerSettings"]


class TrainerSettings(Plug):
    """What every trainer has."""

    use: Annotated[str, Field(min_length=1)] = "fsdp"
    """Which trainer: `fsdp`, an entry point in `tidemill.trainers`, or `module:Class` of a settings class."""
    ranks: Count = 1
    """Processes that train one model together, each on a GPU of its own where there are GPUs."""
    replicas: Count = 1
    """Copies of the model that the ranks hold; each is cut over `ranks / replicas` of them. More copies talk less."""
    dtype: Precision = "auto"
    """Precision of forward and backward. `auto` is bfloat16 on a GPU and float32 on a CPU; masters stay float32."""
    tokens_per_micro_batch: Count = 16384
    """Most tokens, padding included, in one forward pass; a longer answer gets a pass of its own."""
    minibatches: Count = 1
    """Optimizer updates made from one step's answers."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, about a third more time."""
    max_grad_norm: NonNegative = 1.0
    """Gradients with a larger norm are scaled down to it; 0 never scales."""
    offload: Offload = "auto"
    """Whether the trainer sleeps while the engine works; `auto` follows `residency.offload`."""
    keep_addresses: bool = False
    """Whether tensors keep their addresses through sleep, as captured CUDA graphs need; on GPUs only."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of the reinforcement phase."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The learning rate over the steps of the reinforcement phase."""


class FsdpTrainerSettings(TrainerSettings):
    """PyTorch, parameters and optimizer cut over all ranks."""

    implementation: ClassVar[str] = "tidemill.trainers.fsdp.trainer:FsdpTrainer"
