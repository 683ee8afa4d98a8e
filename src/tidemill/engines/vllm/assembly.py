"""What is inside the engine, once vLLM runs: its memory, its weights, its generation, put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.engines.vllm.building import Wanted, build
from tidemill.engines.vllm.draws import CountedDraws, OwnDraws
from tidemill.engines.vllm.generation import Generation
from tidemill.engines.vllm.memory import EngineMemory, HostRooms, MappedRooms
from tidemill.engines.vllm.weights import PlannedWeights
from tidemill.errors import EngineError, ResidencyError
from tidemill.weights.elements import torch_dtype

__all__ = ["Closed", "Inside", "assemble"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inside:
    """The parts of a running vLLM that an engine uses."""

    llm: Any
    runner: Any
    cache_came_back: Callable[[], object]
    caches: Sequence[torch.Tensor]
    memory: EngineMemory
    weights: PlannedWeights
    generation: Generation

    def wake(self, part: Part) -> None:
        """Make room for `part`, with what neither weights nor answers bring there."""
        taken = self.memory.wake(part)
        if Part.WEIGHTS in taken:
            self.weights.pad()
        if Part.KV_CACHE in taken:
            # Its memory may have been anybody's. Kernels multiply what lies beyond an answer by zero: NaN stays NaN.
            with torch.inference_mode():
                for cache in self.caches:
                    cache.zero_()
            self.cache_came_back()

    def forget_cached(self) -> None:
        """Drop whatever was computed with earlier weights. Raises EngineError when it is in use."""
        self.generation.settle()
        self.llm.reset_encoder_cache()
        if not self.llm.reset_prefix_cache():
            raise EngineError("cannot empty vLLM's prefix cache: some of its blocks are in use; sync the weights again")

    def close(self) -> None:
        """End vLLM, and with it the process groups that it has made."""
        # Its allocator gives back only what is there.
        self.memory.wake(Part.ALL)
        self.llm.engine_core.shutdown()
        if "_finalizer" in vars(self.llm.engine_core):
            self.llm.engine_core._finalizer.detach()  # or it would end a later engine's groups


class Closed:
    """Stands in where vLLM has ended, and refuses everything."""

    @property
    def memory(self) -> EngineMemory:
        """Refused."""
        raise self._refusal()

    @property
    def weights(self) -> PlannedWeights:
        """Refused."""
        raise self._refusal()

    @property
    def generation(self) -> Generation:
        """Refused."""
        raise self._refusal()

    def wake(self, part: Part) -> None:
        """Refused."""
        raise self._refusal()

    def forget_cached(self) -> None:
        """Refused."""
        raise self._refusal()

    def close(self) -> None:
        """Nothing is left."""

    def _refusal(self) -> ResidencyError:
        return ResidencyError(
            "cannot use engine: it is closed, or another vLLM engine was made in this process since, which holds one"
        )


def assemble(wanted: Wanted, *, end_ids: Sequence[int], tokenizer: Any, deadline: float, emit: Emit) -> Inside:
    """vLLM as `build` makes it, with everything awake."""
    built = build(wanted)
    model = built.runner.get_model()
    buffers = dict(model.named_buffers())
    parameters = [parameter.detach() for parameter in model.parameters()]
    on_gpu = wanted.device.type == "cuda"
    # On a GPU the buffers lie among the weights, and leave with them; on a CPU they stay.
    tensors = {
        Part.WEIGHTS: [*parameters, *(buffers.values() if on_gpu else ())],
        Part.KV_CACHE: _flat(built.runner.kv_caches),
    }
    rooms = MappedRooms(tensors) if on_gpu else HostRooms(tensors)
    second = bool(built.llm.vllm_config.use_v2_model_runner)
    return Inside(
        llm=built.llm,
        runner=built.runner,
        cache_came_back=_writes_into_cache(built.runner),
        caches=tensors[Part.KV_CACHE],
        memory=EngineMemory(rooms, buffers),
        weights=PlannedWeights(built.plan, folder=wanted.model, naming=wanted.naming, dtype=torch_dtype(wanted.dtype)),
        generation=Generation(
            llm=built.llm,
            draws=OwnDraws() if second else CountedDraws(built.runner),
            end_ids=end_ids,
            tokenizer=tokenizer,
            seeded=second,
            deadline=deadline,
            emit=emit,
        ),
    )


def _writes_into_cache(runner: Any) -> Callable[[], object]:
    """Writes anew what a runner keeps beside keys and values; only some versions keep anything."""
    return runner.post_kv_cache_wake_up if "post_kv_cache_wake_up" in dir(runner) else lambda: None


def _flat(caches: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors of caches, some of which are several."""
    return [tensor for cache in caches for tensor in ([cache] if isinstance(cache, torch.Tensor) else cache)]
