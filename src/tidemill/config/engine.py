"""The rollout engine: who turns prompts into answers."""

from typing import Annotated, ClassVar

from pydantic import Field

from tidemill.config.base import Plug
from tidemill.config.kinds import AutoCount, Budget, Count, Offload, Precision, Seconds, Texts

__all__ = ["EngineSettings", "TransformersEngineSettings", "VllmEngineSettings", "replicas_for"]


class EngineSettings(Plug):
    """What every engine has."""

    float32_mismatch: ClassVar[float] = 0.05
    """Mean difference of log-probs in nats that its kernels explain, where it and the trainer compute in float32."""

    elsewhere: ClassVar[bool] = False
    """Whether it is no process of the run: nothing is placed for it, and the driver speaks to it."""

    use: Annotated[str, Field(min_length=1)] = "transformers"
    """Which engine: `transformers`, `vllm`, `sglang`, `remote`, an entry point in `tidemill.engines`, or `module:Class`
    of a settings class."""
    replicas: AutoCount = "auto"
    """Engines that share the prompts of a step. `auto` is one on each GPU that the trainer shares, or just one."""
    dtype: Precision = "auto"
    """Precision of the engine's weights. `auto` is bfloat16 on a GPU and float32 on a CPU."""
    max_batch: Count = 64
    """Most answers generated at once."""
    offload: Offload = "auto"
    """Whether the engine sleeps while the trainer works; `auto` follows `residency.offload`."""


class TransformersEngineSettings(EngineSettings):
    """A batched loop of our own over a `transformers` model."""

    implementation: ClassVar[str] = "tidemill.engines.transformers.engine:TransformersEngine"
    float32_mismatch: ClassVar[float] = 0.001


class VllmEngineSettings(EngineSettings):
    """vLLM, in the engine's own process, on one GPU, or on a CPU with a build for it."""

    implementation: ClassVar[str] = "tidemill.engines.vllm.engine:VllmEngine"
    float32_mismatch: ClassVar[float] = 0.01
    requires: ClassVar[tuple[str, ...]] = ("vllm",)

    kv_memory: Budget = "auto"
    """Bytes for keys and values, which are there while answers are generated. `auto` is room for `engine.max_batch`
    answers of the longest prompts; more of it keeps more prompts in vLLM's prefix cache."""
    graphs: bool = True
    """Whether CUDA graphs are captured at the start, which then takes about a minute longer; a CPU has none."""
    deadline: Seconds = 600.0
    """Longest time in which no token is computed while answers are generated; then the step fails."""
    options: Texts = ()
    """vLLM's own engine options, each as `name=value` with a value in TOML, such as `"max_num_batched_tokens=8192"` or
    `"attention_backend='TRITON_ATTN'"`. Those that other settings decide, or the engine itself, are refused."""


def replicas_for(wanted: int | str, *, ranks: int, shares_gpus: bool) -> int:
    """What `engine.replicas` stands for: `auto` leaves no GPU idle that `ranks` trainer ranks share with the engine."""
    if isinstance(wanted, int):
        return wanted
    return max(1, ranks) if shares_gpus else 1
