"""Requests checked before anything runs, and split into batches that fit the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.contracts.engine import Request, Sampling
from tidemill.errors import EngineError

__all__ = ["Limits", "check_requests", "check_sampling", "plan_batches"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the model and its cache can take: `context` positions a row, `kv_tokens` cached positions in all."""

    context: int
    vocabulary: int
    max_batch: int
    kv_tokens: int


def check_sampling(sampling: Sampling, limits: Limits) -> None:
    """Raises EngineError for settings that describe no distribution."""
    if sampling.max_new_tokens < 1:
        raise EngineError(f"cannot generate with max_new_tokens = {sampling.max_new_tokens}: it should be 1 or more")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise EngineError(f"cannot generate at temperature {sampling.temperature}: it should be 0 (greedy) or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise EngineError(f"cannot generate with top_p = {sampling.top_p}: it should be above 0 and at most 1")
    if sampling.top_k < 0:
        raise EngineError(f"cannot generate with top_k = {sampling.top_k}: it should be 0 (keep all) or more")
    if "" in sampling.stop:
        raise EngineError("cannot generate with an empty stop string: it would end every answer; leave it out")
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < limits.vocabulary]
    if outside:
        raise EngineError(
            f"cannot stop at token id {outside[0]}: the model has {limits.vocabulary} ids; correct stop_token_ids"
        )


def check_requests(requests: Sequence[Request], sampling: Sampling, limits: Limits) -> None:
    """Raises EngineError, naming the request, when one of them cannot be answered."""
    seen: set[str] = set()
    room = min(limits.context, limits.kv_tokens)
    for request in requests:
        length = len(request.token_ids)
        if length == 0:
            raise EngineError(f"cannot answer request {request.key}: its prompt holds no token")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < limits.vocabulary:
            raise EngineError(
                f"cannot answer request {request.key}: its token ids reach from {min(request.token_ids)} to "
                f"{max(request.token_ids)}, but the model has {limits.vocabulary}; use the model's own tokenizer"
            )
        if length + sampling.max_new_tokens > room:
            what = "the model's context" if room == limits.context else "the cache (kv_tokens)"
            raise EngineError(
                f"cannot answer request {request.key}: {length} prompt tokens and {sampling.max_new_tokens} new ones "
                f"are {length + sampling.max_new_tokens}, more than the {room} that {what} can hold; lower "
                f"rollout.sampling.max_new_tokens or data.max_prompt_tokens"
            )
        if request.key in seen:
            raise EngineError(f"cannot answer two requests with the one key {request.key}: their draws would be equal")
        seen.add(request.key)


def plan_batches(lengths: Sequence[int], *, new_tokens: int, limits: Limits) -> list[list[int]]:
    """Indices of requests, shortest prompt first, ties in order, in batches that keep to `max_batch` and `kv_tokens`.

    A batch costs rows times (its longest prompt + `new_tokens`) cached positions.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        rows = limits.kv_tokens // (lengths[index] + new_tokens)
        if not batches or len(batches[-1]) >= min(rows, limits.max_batch):
            batches.append([])
        batches[-1].append(index)
    return batches
