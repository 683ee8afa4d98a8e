"""SGLang's own server: `/generate` with token ids, memory released and resumed by tags, weights from a folder.

Written against 0.5.17. It names the version of its weights in each answer. Its log-probs are taken before top-k and
top-p, so that samplings with these are refused; its draws follow a request's seed only when it was started with
--enable-deterministic-inference.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import StopReason
from tidemill.engines.remote.client import Client, Refused, ServerFailed
from tidemill.engines.remote.dialect import Served, ServerAnswer
from tidemill.errors import EngineError, WeightSyncError

__all__ = ["SglangDialect"]

_TAGS = {Part.WEIGHTS: ["weights"], Part.KV_CACHE: ["kv_cache", "cuda_graph"]}
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_HOT = 1e6
_LOOK = 0.05  # seconds between two questions whether it is idle


class SglangDialect:
    """Implements `Dialect`."""

    name = "SGLang"
    aliased = False
    advice = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def check_sampling(self, sampling: Sampling) -> None:
        """Greedy or over all tokens."""
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1.0):
            raise EngineError(
                f"cannot sample with top_p = {sampling.top_p} and top_k = {sampling.top_k} on SGLang: its log-probs "
                "are over all tokens, not over those that were kept; leave them at 1 and 0, or use another engine"
            )

    def known(self, vocabulary: int) -> tuple[Sampling, float]:
        """Where it is hot enough every id is as likely as any other."""
        return Sampling(max_new_tokens=1, temperature=_HOT, seed=1), -math.log(vocabulary)

    def path(self) -> str:
        """Its own endpoint: the compatible ones give no token ids."""
        return "/generate"

    def body(
        self, request: Request, sampling: Sampling, *, ends: Sequence[int], seed: int | None, model: str
    ) -> Mapping[str, Any]:
        """One prompt. A server has one model, and is not told which."""
        how: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ends),
            "no_stop_trim": True,
        }
        return {
            "input_ids": list(request.token_ids),
            "sampling_params": how if seed is None else how | {"sampling_seed": seed},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }

    def answer(self, said: Any) -> ServerAnswer:
        """Ids come twice, and must agree."""
        told = said["meta_info"]
        pairs = told["output_token_logprobs"]
        ids = tuple(int(pair[1]) for pair in pairs)
        if ids != tuple(said["output_ids"]):
            raise ValueError(f"log-probs of {len(ids)} tokens that are not the {len(said['output_ids'])} of output_ids")
        return ServerAnswer(
            token_ids=ids,
            logprobs=tuple(float(pair[0]) for pair in pairs),
            stop_reason=_REASONS.get(told["finish_reason"]["type"], StopReason.ABORTED),
            stamp=f"version {told['weight_version']}",
        )

    def healthy(self, client: Client, *, deadline: float) -> None:
        """Asks for a token unless it is busy with others; so never while it sleeps."""
        client.get("/health", deadline=deadline)

    def served(self, client: Client, *, text: str, deadline: float) -> Served:
        """Its one model."""
        told = self._model(client, deadline)
        said = client.post("/tokenize", {"prompt": text, "add_special_tokens": False}, deadline=deadline)
        try:
            return Served(
                name=str(told["model_path"]),
                context=int(said.get("max_model_len") or 0),
                kind=str(told.get("model_type") or ""),
                token_ids=tuple(said["tokens"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFailed(f"{client.named} does not describe its model; is it an SGLang server?") from error

    def stamp(self, client: Client, *, deadline: float) -> str:
        """The version that came with its weights; another when it was started again."""
        return f"version {self._model(client, deadline).get('weight_version')}"

    def load(self, client: Client, *, folder: Path, stamp: str, deadline: float) -> str:
        """Nothing is under way while the weights change: the server would not survive it."""
        ends = time.monotonic() + deadline
        self._idle(client, ends)
        asked = {"model_path": str(folder), "weight_version": stamp, "flush_cache": True}
        said = client.post("/update_weights_from_disk", asked, deadline=max(1.0, ends - time.monotonic()))
        if not isinstance(said, dict) or said.get("success") is not True:
            why = said.get("message") if isinstance(said, dict) else said
            raise WeightSyncError(f"{client.named} could not load the weights in {folder}: {why}; see its log")
        return self.stamp(client, deadline=deadline)

    def awake(self, client: Client, *, deadline: float) -> Part:
        """Everything, after its start: it does not say."""
        return Part.WEIGHTS | Part.KV_CACHE

    def sleep(self, client: Client, awake: Part, *, deadline: float) -> None:
        """By tags: what is released twice ends its process. It keeps no copy without --enable-weights-cpu-backup."""
        ends = time.monotonic() + deadline
        self._idle(client, ends)
        if tags := _tags(awake):
            client.post("/release_memory_occupation", {"tags": tags}, deadline=max(1.0, ends - time.monotonic()))

    def wake_up(self, client: Client, part: Part, *, deadline: float) -> None:
        """By its tags; graphs come with the cache."""
        client.post("/resume_memory_occupation", {"tags": _tags(part)}, deadline=deadline)

    def _model(self, client: Client, deadline: float) -> dict[str, Any]:
        told = client.get("/model_info", deadline=deadline)
        if not isinstance(told, dict) or "model_path" not in told:
            raise ServerFailed(f"{client.named} does not describe its model at /model_info; is it an SGLang server?")
        return told

    def _idle(self, client: Client, ends: float) -> None:
        """End what is under way, and wait until it has ended: only then can the cache be flushed."""
        client.post("/abort_request", {"abort_all": True}, deadline=max(1.0, ends - time.monotonic()))
        while True:
            try:
                client.post("/flush_cache", None, deadline=max(1.0, ends - time.monotonic()))
                return
            except Refused as error:
                if time.monotonic() > ends:
                    raise ServerFailed(f"{client.named} is still generating for somebody: {error}") from error
            time.sleep(_LOOK)


def _tags(part: Part) -> list[str]:
    return [tag for one, some in _TAGS.items() if one in part for tag in some]
