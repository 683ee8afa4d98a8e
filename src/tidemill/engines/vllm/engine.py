"""Rollouts by vLLM, in this process, on one device: continuous batches over a paged cache, captured graphs.

Promises: an answer is generated only under weights of a known version, with no block of the prefix cache from another;
its ids are those sampled, each with its log-prob under the distribution sampled from; draws depend on seed, request key
and logits alone. Does not: use more than one device, generate for two threads at once, run code from a model folder.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.data.tokenizer_folder import load_tokenizer
from tidemill.engines.common.answers import completions
from tidemill.engines.common.held_version import HeldVersion
from tidemill.engines.common.presence import check_resident
from tidemill.engines.common.requests import Limits, check_requests, check_sampling
from tidemill.engines.common.stopping import end_ids
from tidemill.engines.vllm.environment import import_vllm
from tidemill.errors import EngineError, ResidencyError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import model_skeleton
from tidemill.residency.gate import TenantGate
from tidemill.residency.leaks import leak_gate
from tidemill.residency.residue import residue_of
from tidemill.residency.transfer import CudaTransfer, HostTransfer
from tidemill.residency.workspaces import hold_workspaces
from tidemill.weights.elements import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.engines.vllm.assembly import Closed, Inside

__all__ = ["VllmEngine"]

_PARTS = Part.WEIGHTS | Part.KV_CACHE


_present: "list[weakref.ref[VllmEngine]]" = []


def _nothing() -> None:
    """Nothing was held."""


def _close_earlier() -> None:
    """vLLM can be in a process once: of what it keeps for all of one, a second's end would take the first one's."""
    while _present:
        earlier = _present.pop()()
        if earlier is not None:
            earlier.close()
        del earlier
    gc.collect()


class VllmEngine:
    """Starts asleep and empty: `wake_up` makes room, a weight sync or `load_pretrained` fills it.

    `kv_tokens` positions can be cached at once, by answers that are under way; 0 means `max_batch` times the model's
    whole context. `kv_memory` is the cache in bytes, or `auto` for `kv_tokens`. `graphs` are captured at the start.
    `deadline` is the longest time in seconds without a token. `options` are vLLM's own, each `name=value` in TOML.
    `stop_on_leak` refuses a sleep when tensors that nobody owns have grown, instead of a warning.
    """

    def __init__(
        self,
        *,
        model: Path,
        device: str,
        dtype: Literal["float32", "bfloat16"],
        max_batch: int,
        emit: Emit,
        kv_tokens: int = 0,
        kv_memory: int | Literal["auto"] = "auto",
        graphs: bool = True,
        deadline: float = 600.0,
        options: Sequence[str] = (),
        stop_on_leak: bool = True,
    ) -> None:
        self._device = torch.device(device)
        self._residue = residue_of(self._device)
        self._dtype = dtype
        self._gate = TenantGate(self.name)
        self._tokenizer = load_tokenizer(model)
        self._held = HeldVersion()
        self._users: dict[str, object] = {}
        skeleton = model_skeleton(model, torch_dtype(dtype))
        config = skeleton.config
        context, vocabulary = config.max_position_embeddings, config.vocab_size
        kv_tokens = kv_tokens or max_batch * context
        self._limits = Limits(context=context, vocabulary=vocabulary, max_batch=max_batch, kv_tokens=kv_tokens)
        _close_earlier()
        import_vllm(emit)
        # vLLM is imported under our variables alone.
        from tidemill.engines.vllm.assembly import assemble
        from tidemill.engines.vllm.building import Wanted

        wanted = Wanted(
            model=model,
            device=self._device,
            dtype=dtype,
            max_batch=max_batch,
            context=min(context, kv_tokens),
            kv_tokens=kv_tokens,
            kv_bytes=0 if kv_memory == "auto" else kv_memory,
            graphs=graphs,
            options=tuple(options),
            naming=model_naming(skeleton),
        )
        ends = end_ids(model, self._tokenizer, vocabulary)
        with self._residue.holding("vllm"):
            self._inside: Inside | Closed = assemble(
                wanted, end_ids=ends, tokenizer=self._tokenizer, deadline=deadline, emit=emit
            )
        self._let_go = hold_workspaces() if graphs else _nothing
        self._transfer = CudaTransfer(self._device) if self._device.type == "cuda" else HostTransfer()
        self._leaks = leak_gate(self.name, self._device, stop=stop_on_leak, emit=emit)
        self._inside.memory.sleep()
        self._transfer.give_back()
        _present.append(weakref.ref(self))

    def close(self) -> None:
        """End vLLM: the engine refuses everything from now on."""
        from tidemill.engines.vllm.assembly import Closed

        inside, self._inside = self._inside, Closed()
        inside.close()
        self._let_go()

    @property
    def name(self) -> str:
        """`engine`."""
        return "engine"

    @property
    def gate(self) -> TenantGate:
        """Opened by Residency for the length of a lease."""
        return self._gate

    @property
    def dtype(self) -> str:
        """What weights are cast to, `float32` or `bfloat16`."""
        return self._dtype

    # Memory

    def resident(self) -> Part:
        """Weights and cache: whichever was woken."""
        return self._inside.memory.present

    def footprint(self, part: Part) -> int:
        """Bytes of vLLM's parameters, and of its paged cache."""
        return self._inside.memory.size(part)

    def host_bytes(self) -> int:
        """A few buffers: sleeping discards the weights."""
        return self._inside.memory.host_bytes

    def wake_up(self, part: Part) -> Moved:
        """Make room. Weights come back without content: generation waits for a sync. Room that is there stays."""
        self._inside.wake(part)
        return Moved()

    def sleep(self) -> Moved:
        """Give everything back; the version is forgotten with the weights. Refused while an answer is generated.

        When it is refused, for a leak or for memory that is lent to somebody, the engine is as before.
        """
        me = object()
        try:
            if not self._alone(me):
                raise ResidencyError("cannot put engine to sleep: it is generating in another thread; wait for its end")
            self._inside.generation.settle_if_possible()
            self._inside.memory.check_can_sleep()
            self._leaks.check()
            self._transfer.quiet()
            self._held.forget()
            self._inside.memory.sleep()
            self._transfer.give_back()
            return Moved(left=self._residue.left())
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]

    def _alone(self, user: object) -> bool:
        """Whether `user` has the engine for itself from now on; others are refused, not kept waiting.

        Called in the `try` at whose end it leaves, which calls nothing: Python delivers signals at calls, and one that
        raises before the `try` or within its end would leave the engine taken for good.
        """
        return self._users.setdefault("present", user) is user

    # Weights

    @property
    def version(self) -> PolicyVersion | None:
        """Of all the weights; None from `begin_update` or `sleep` until `publish`."""
        return self._held.version

    def begin_update(self) -> None:
        """Close generation and forget the version."""
        self._need(Part.WEIGHTS, "begin_update")
        self._held.begin()
        self._inside.weights.begin()

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights in: all at once, or some in each of several calls. Tied tensors come once, by the first's name.

        Raises WeightSyncError when names or shapes do not fit. After any failure the engine waits for another
        `begin_update` and a whole set.
        """
        self._need(Part.WEIGHTS, "load_weights")
        with self._held.loading():
            self._inside.weights.load(tensors)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Checksum of each weight of `sample` as it lies in vLLM's parameters, in the engine's dtype."""
        self._need(Part.WEIGHTS, "weight_checksums")
        return self._inside.weights.checksums(sample)

    def publish(self, version: PolicyVersion) -> None:
        """Empty the prefix cache, take on `version` and open generation."""
        self._need(Part.WEIGHTS, "publish")
        self._held.check(version, self._inside.weights.missing())
        self._inside.forget_cached()
        self._held.take(version)

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Load the model folder's own weights as `version`: for use without a trainer."""
        self.begin_update()
        self.load_weights(self._inside.weights.stored())
        self.publish(version)

    def _need(self, part: Part, doing: str) -> None:
        self._gate.check(part, doing)
        check_resident(self.resident(), part, doing)

    # Generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests."""
        self._need(_PARTS, "generate")
        version = self._held.known()
        check_sampling(sampling, self._limits)
        check_requests(requests, sampling, self._limits)
        me = object()
        try:
            if not self._alone(me):
                raise EngineError("cannot generate: the engine is busy in another thread; use one thread at a time")
            answers = self._inside.generation.answers(requests, sampling)
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]
        return completions(answers, version, self._tokenizer)
