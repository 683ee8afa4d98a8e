"""Making vLLM's engine: in this process, on one device, with a cache of the size asked for, and without weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from tidemill.compat.vllm_cpu_weights import check_plain, keep_plain
from tidemill.engines.vllm.environment import left_alone
from tidemill.engines.vllm.loading import LOAD_FORMAT, Baked, expecting
from tidemill.engines.vllm.options import native_options
from tidemill.errors import EngineError
from tidemill.names.naming import Naming
from tidemill.units import MIB
from tidemill.weights.copy_plan import CopyPlan

__all__ = ["Built", "Wanted", "build"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`kv_tokens` positions are cached for `max_batch` answers at once; or as many as fit into `kv_bytes`, if not 0."""

    model: Path
    device: torch.device
    dtype: str
    max_batch: int
    context: int
    kv_tokens: int
    kv_bytes: int
    graphs: bool
    options: Sequence[str]
    naming: Naming


@dataclass(frozen=True, kw_only=True, eq=False)
class Built:
    """vLLM's engine, the runner of its model, and the plan by which weights come into it."""

    llm: Any
    runner: Any
    plan: CopyPlan


def build(wanted: Wanted) -> Built:
    """Raises ConfigError for options that cannot be, EngineError for a model that cannot be used this way."""
    options = native_options(wanted.options, [field.name for field in dataclasses.fields(EngineArgs)])
    if wanted.device.type == "cpu":
        keep_plain()
    baked = Baked({name: cut.shape for name, cut in wanted.naming.names.items()})
    expecting(baked)
    with left_alone():
        try:
            llm = _made(wanted, options)
        except (ValueError, RuntimeError) as error:
            raise EngineError(
                f"cannot start vLLM for {wanted.model}: {error}; look at engine.options and engine.kv_memory, and set "
                "VLLM_LOGGING_LEVEL=INFO to see what it does"
            ) from error
    runner = llm.model_executor.driver_worker.model_runner
    if wanted.device.type == "cpu":
        check_plain(runner.get_model())
    return Built(llm=llm, runner=runner, plan=baked.checked(runner.get_model()))


def _made(wanted: Wanted, options: Mapping[str, Any]) -> Any:
    arguments = EngineArgs(
        model=str(wanted.model),
        skip_tokenizer_init=True,
        dtype=wanted.dtype,
        seed=0,
        load_format=LOAD_FORMAT,
        generation_config="vllm",
        max_num_seqs=wanted.max_batch,
        max_model_len=wanted.context,
        # Not looked at: how many blocks there are is said below. Without it vLLM measures what is free.
        kv_cache_memory_bytes=wanted.kv_bytes or MIB,
        gpu_memory_utilization=0.01,
        enable_sleep_mode=wanted.device.type == "cuda",
        logprobs_mode="processed_logprobs",
        enforce_eager=not wanted.graphs or wanted.device.type == "cpu",
        distributed_executor_backend="uni",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **options,
    )
    config = arguments.create_engine_config()
    _check_usable(config.model_config)
    if not wanted.kv_bytes:
        size = config.cache_config.block_size
        # Every answer may leave its last block nearly empty, and one block is vLLM's own.
        blocks = -(-wanted.kv_tokens // size) + wanted.max_batch + 1
        config.cache_config.num_gpu_blocks_override = max(blocks, -(-wanted.context // size) + 1)
    return LLMEngine(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False
    )


def _check_usable(model: Any) -> None:
    """Raises EngineError for models whose kernels use something that vLLM derives from weights as it loads them."""
    if model.quantization is not None:
        raise EngineError(
            f"cannot use vLLM for a model that is quantized ({model.quantization}): weights that the trainer hands "
            "over are not; choose a model in bfloat16"
        )
    if model.use_mla:
        raise EngineError(
            "cannot use vLLM for a model with latent attention: it derives matrices from weights when it loads them, "
            "which no update would reach; use engine.use = transformers"
        )
