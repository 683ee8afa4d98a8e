"""vLLM's server: the completions endpoint, and the control endpoints that VLLM_SERVER_DEV_MODE=1 opens.

Written against 0.24.0 and 0.32.0. The later one names the version of its weights; of the earlier one the start of its
process is known, from /metrics, so that a server that was started again is not taken for the one that got the weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import StopReason
from tidemill.engines.remote.client import Client, Refused, ServerFailed
from tidemill.engines.remote.dialect import Served, ServerAnswer

__all__ = ["VllmDialect"]

_TAGS = {Part.WEIGHTS: "weights", Part.KV_CACHE: "kv_cache"}
_ALL = Part.WEIGHTS | Part.KV_CACHE
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_STARTED = "process_start_time_seconds"
_NOT_THERE = {404, 405, 501}
_DISCARD = 2  # the level of sleep that keeps no copy of the weights


class VllmDialect:
    """Implements `Dialect`."""

    name = "vLLM"
    # Its CPU build repacks the head and keeps the old one unless it comes by its own name.
    aliased = True
    advice = "start it with --logprobs-mode processed_logprobs"

    def check_sampling(self, sampling: Sampling) -> None:
        """Every sampling has log-probs of what was sampled from, with --logprobs-mode processed_logprobs."""

    def known(self, vocabulary: int) -> tuple[Sampling, float]:
        """The only token that is kept is certain."""
        return Sampling(max_new_tokens=1, top_k=1), 0.0

    def path(self) -> str:
        """Completions take token ids."""
        return "/v1/completions"

    def body(
        self, request: Request, sampling: Sampling, *, ends: Sequence[int], seed: int | None, model: str
    ) -> Mapping[str, Any]:
        """One prompt; whatever the model's folder suggests for sampling is said here, so that it does not count."""
        asked: dict[str, Any] = {
            "model": model,
            "prompt": list(request.token_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ends),
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": False,
        }
        return asked if seed is None else asked | {"seed": seed}

    def answer(self, said: Any) -> ServerAnswer:
        """The only choice."""
        (choice,) = said["choices"]
        return ServerAnswer(
            token_ids=tuple(int(token) for token in choice["token_ids"]),
            logprobs=tuple(float(value) for value in choice["logprobs"]["token_logprobs"]),
            stop_reason=_REASONS.get(choice["finish_reason"], StopReason.ABORTED),
        )

    def healthy(self, client: Client, *, deadline: float) -> None:
        """Asks whether its engine lives."""
        client.get("/health", deadline=deadline)

    def served(self, client: Client, *, text: str, deadline: float) -> Served:
        """The first model that it lists."""
        models = client.get("/v1/models", deadline=deadline)
        try:
            first = models["data"][0]
            name, context = str(first["id"]), int(first.get("max_model_len") or 0)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFailed(f"{client.named} lists no model at /v1/models; is it a vLLM server?") from error
        asked = {"model": name, "prompt": text, "add_special_tokens": False}
        said = _unless_missing(lambda: client.post("/tokenize", asked, deadline=deadline))
        ids = said.get("tokens", ()) if isinstance(said, dict) else ()
        return Served(name=name, context=context, token_ids=tuple(ids))

    def stamp(self, client: Client, *, deadline: float) -> str:
        """The version that it was told, else the start of its process."""
        said = _unless_missing(lambda: client.get("/weight_info", deadline=deadline))
        if isinstance(said, dict) and "weight_version" in said:
            return f"version {said['weight_version']}"
        told = _unless_missing(lambda: client.get("/metrics", deadline=deadline))
        lines = told.splitlines() if isinstance(told, str) else ()
        return next((f"started {line.split()[1]}" for line in lines if line.startswith(_STARTED + " ")), "")

    def load(self, client: Client, *, folder: Path, stamp: str, deadline: float) -> str:
        """Nothing is under way while the weights change; what was is ended."""
        client.post("/pause?mode=abort", None, deadline=deadline)
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": deadline}
        client.post("/collective_rpc", asked, deadline=deadline)
        _unless_missing(lambda: client.post("/update_weight_version", {"new_version": stamp}, deadline=deadline))
        said = client.post("/reset_prefix_cache", None, deadline=deadline)
        if isinstance(said, dict) and said.get("success") is False:
            raise ServerFailed(f"{client.named} did not drop its prefix cache: somebody else is using it")
        client.post("/resume", None, deadline=deadline)
        return self.stamp(client, deadline=deadline)

    def awake(self, client: Client, *, deadline: float) -> Part:
        """It says whether it sleeps; waking what is awake does it no harm."""
        said = client.get("/is_sleeping", deadline=deadline)
        return Part.NONE if isinstance(said, dict) and said.get("is_sleeping") else _ALL

    def sleep(self, client: Client, awake: Part, *, deadline: float) -> None:
        """Its weights are discarded: they are of a version that the trainer leaves behind.

        One that is awake in part believes that it sleeps, and would keep that part.
        """
        if absent := _ALL & ~awake:
            self.wake_up(client, absent, deadline=deadline)
        client.post(f"/sleep?{urlencode({'level': _DISCARD, 'mode': 'abort'})}", None, deadline=deadline)

    def wake_up(self, client: Client, part: Part, *, deadline: float) -> None:
        """By its tags."""
        tags = [("tags", tag) for one, tag in _TAGS.items() if one in part]
        client.post(f"/wake_up?{urlencode(tags)}", None, deadline=deadline)


def _unless_missing(ask: Any) -> Any:
    """What `ask` gives, or None from a server that has no such endpoint."""
    try:
        return ask()
    except Refused as error:
        if error.status not in _NOT_THERE:
            raise
        return None
