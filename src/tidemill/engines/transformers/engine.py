"""Rollouts by transformers' own models, in this process: batched sampling with a key-value cache.

Promises: an answer is generated only under weights of a known version; its ids are those sampled, each with its
log-prob; draws depend on seed and request key alone. The key-value cache lives within one `generate`: no cache outlasts
a change of weights. Does not: generate for two threads at once, use more than one device, run code from a model folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit, Progress
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.data.tokenizer_folder import load_tokenizer
from tidemill.engines.common.answers import Answer, completions
from tidemill.engines.common.held_version import HeldVersion
from tidemill.engines.common.presence import check_resident
from tidemill.engines.common.requests import Limits, check_requests, check_sampling, plan_batches
from tidemill.engines.common.sampling import row_keys, uniforms
from tidemill.engines.common.stopping import NoStopStrings, StopStrings, end_ids
from tidemill.engines.transformers.decode import decode
from tidemill.engines.transformers.live_weights import LiveWeights
from tidemill.errors import EngineError, ResidencyError
from tidemill.models.skeleton import model_skeleton
from tidemill.residency.gate import TenantGate
from tidemill.residency.leaks import leak_gate
from tidemill.residency.residue import residue_of
from tidemill.residency.transfer import CudaTransfer, HostTransfer
from tidemill.weights.checksum import sampled_checksums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TransformersEngine"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PARTS = Part.WEIGHTS | Part.KV_CACHE


class TransformersEngine:
    """Starts asleep and empty: `wake_up` makes room, a weight sync or `load_pretrained` fills it.

    `kv_tokens` bounds the positions cached at once, and with them the bytes that the engine says it takes; 0 means
    `max_batch` rows of the model's whole context. Batches are cut so that they keep to it. `stop_on_leak` refuses a
    sleep when tensors that nobody owns have grown, instead of a warning.
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
        stop_on_leak: bool = True,
    ) -> None:
        self._folder = model
        self._device = torch.device(device)
        self._residue = residue_of(self._device)
        self._dtype = dtype
        torch_dtype = _DTYPES[dtype]
        self._emit = emit
        self._gate = TenantGate(self.name)
        self._tokenizer = load_tokenizer(model)
        self._model = model_skeleton(model, torch_dtype)
        config = self._model.config
        self._limits = Limits(
            context=config.max_position_embeddings,
            vocabulary=config.vocab_size,
            max_batch=max_batch,
            kv_tokens=kv_tokens or max_batch * config.max_position_embeddings,
        )
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        self._kv_token_bytes = (
            2 * layers * heads * self._model.model.layers[0].self_attn.head_dim * torch_dtype.itemsize
        )
        self._end_ids = end_ids(model, self._tokenizer, config.vocab_size)
        self._weights = LiveWeights(model=self._model, device=self._device, dtype=torch_dtype)
        self._transfer = CudaTransfer(self._device) if self._device.type == "cuda" else HostTransfer()
        self._leaks = leak_gate(self.name, self._device, stop=stop_on_leak, emit=emit)
        self._kv_awake = False
        self._users: dict[str, object] = {}
        self._held = HeldVersion()

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
        return (Part.WEIGHTS if self._weights.resident else Part.NONE) | (
            Part.KV_CACHE if self._kv_awake else Part.NONE
        )

    def footprint(self, part: Part) -> int:
        """Bytes of the slab of weights, and of the largest cache that a batch may build."""
        weights = self._weights.nbytes if Part.WEIGHTS in part else 0
        cache = self._limits.kv_tokens * self._kv_token_bytes if Part.KV_CACHE in part else 0
        return weights + cache

    def host_bytes(self) -> int:
        """A few buffers: sleeping discards the weights."""
        return self._weights.host_bytes

    def wake_up(self, part: Part) -> Moved:
        """Make room. Weights come back without content: generation waits for a sync. Room that is there stays."""
        if Part.WEIGHTS in part:
            try:
                self._weights.allocate()
            except (RuntimeError, MemoryError) as error:
                raise ResidencyError(
                    f"cannot wake engine (weights): {self._weights.nbytes} bytes could not be allocated on "
                    f"{self._device}: {error}; lower residency.budget or use a smaller model"
                ) from error
        self._kv_awake = self._kv_awake or Part.KV_CACHE in part
        return Moved()

    def sleep(self) -> Moved:
        """Give everything back; the version is forgotten with the weights. Refused while an answer is generated.

        When it is refused, for a leak or for weights that are lent to somebody, the engine is as before.
        """
        me = object()
        try:
            if not self._alone(me):
                raise ResidencyError("cannot put engine to sleep: it is generating in another thread; wait for its end")
            self._weights.check_can_release()
            self._leaks.check()
            self._weights.release()
            self._held.forget()
            self._kv_awake = False
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
        self._weights.begin()

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights in: all at once, or some in each of several calls. Tied tensors come once, by the first's name.

        Raises WeightSyncError when names or shapes do not fit. After any failure the engine waits for another
        `begin_update` and a whole set.
        """
        self._need(Part.WEIGHTS, "load_weights")
        with self._held.loading():
            self._weights.load(tensors)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Checksum of each weight of `sample` as it lies on the device, in the engine's dtype."""
        self._need(Part.WEIGHTS, "weight_checksums")
        return sampled_checksums(self._weights.views(), sample)

    def publish(self, version: PolicyVersion) -> None:
        """Take on `version` and open generation."""
        self._need(Part.WEIGHTS, "publish")
        self._held.check(version, self._weights.missing())
        self._held.take(version)

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Load the model folder's own weights as `version`: for use without a trainer."""
        self.begin_update()
        self.load_weights(self._weights.stored(self._folder))
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
            answers = self._answer(requests, sampling)
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]
        return completions(answers, version, self._tokenizer)

    def _answer(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        ends = torch.zeros(self._limits.vocabulary, dtype=torch.bool)
        ends[[*self._end_ids, *sampling.stop_token_ids]] = True
        ends = ends.to(self._device)
        lengths = [len(request.token_ids) for request in requests]
        found: dict[int, Answer] = {}
        for batch in plan_batches(lengths, new_tokens=sampling.max_new_tokens, limits=self._limits):
            chosen = [requests[index] for index in batch]
            keys = row_keys(sampling.seed, [request.key for request in chosen])
            answers = decode(
                self._model,
                [request.token_ids for request in chosen],
                uniforms=uniforms(keys, sampling.max_new_tokens),
                sampling=sampling,
                ends=ends,
                stop=self._stop_strings(sampling.stop, len(chosen)),
            )
            found.update(zip(batch, answers, strict=True))
            self._emit(Progress(what="answers", done=len(found), total=len(requests)))
        return [found[index] for index in range(len(requests))]

    def _stop_strings(self, stop: tuple[str, ...], rows: int) -> StopStrings | NoStopStrings:
        if not stop:
            return NoStopStrings(rows=rows)
        return StopStrings(stop=stop, tokenizer=self._tokenizer, rows=rows)
