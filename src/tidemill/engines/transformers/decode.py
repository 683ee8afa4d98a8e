"""The batched loop: prompts in, sampled ids and their log-probs out, with a key-value cache that lives for one batch.

Prompts of unequal length are padded on the left. A row that has ended goes along, unread, until half of the rows have
ended; then the ended ones are dropped. Letters: `B` rows, `P` padded prompt length, `N` new tokens, `V` vocabulary.
Per token the loop waits for the device once, to learn how many rows are left.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from tidemill.contracts.engine import Sampling
from tidemill.contracts.sample import StopReason
from tidemill.engines.common.answers import Answer
from tidemill.engines.common.sampling import draw, greedy
from tidemill.engines.common.stopping import NEVER, NoStopStrings, StopStrings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int64
    from torch import Tensor

__all__ = ["decode"]


class _Rows:
    """The rows still in the batch. `index` maps them to the batch's first order; the rest lies in the present order."""

    def __init__(self, prompts: Sequence[Sequence[int]], new_tokens: int, device: torch.device) -> None:
        lengths = np.array([len(prompt) for prompt in prompts])
        self.width = int(lengths.max())
        ids = np.zeros((len(prompts), self.width), dtype=np.int64)
        real = np.ones((len(prompts), self.width + new_tokens), dtype=bool)
        for row, prompt in enumerate(prompts):
            ids[row, self.width - len(prompt) :] = prompt
            real[row, : self.width - len(prompt)] = False
        self.ids = torch.from_numpy(ids).to(device)
        self.ragged = bool(lengths.min() < self.width)
        self.real = torch.from_numpy(real).to(device)
        self.lengths = torch.from_numpy(lengths).to(device)
        self.index = torch.arange(len(prompts), device=device)
        self.alive = torch.ones(len(prompts), dtype=torch.bool, device=device)

    def inputs(self, position: int) -> "dict[str, Tensor | None]":
        """What the model is given so that its last logits predict new token number `position`."""
        mask = self.real[:, : self.width + position]
        if position:
            positions = (self.lengths + (position - 1))[:, None]
        else:
            positions = (mask.long().cumsum(1) - 1).clamp_(min=0)
        return {
            "input_ids": self.ids,
            "attention_mask": mask if self.ragged else None,
            "position_ids": positions,
        }

    def drop_ended(self, cache: Any) -> None:
        """Keep the rows that are alive only, in the cache too."""
        kept = self.alive.nonzero()[:, 0]
        cache.batch_select_indices(kept)
        self.ids, self.real, self.lengths = self.ids[kept], self.real[kept], self.lengths[kept]
        self.index, self.alive = self.index[kept], self.alive[kept]


def _cache_keyword(model: Any) -> str:
    # transformers 5.24 renamed the argument and warns about the old name; 5.17 knows the old one only.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    uniforms: "Float64[np.ndarray, 'B N']",
    sampling: Sampling,
    ends: "Bool[Tensor, ' V']",
    stop: StopStrings | NoStopStrings,
) -> list[Answer]:
    """An answer for each prompt, in order. `ends` is True at the ids that end one, on the model's device."""
    new_tokens, device = sampling.max_new_tokens, ends.device
    rows = _Rows(prompts, new_tokens, device)
    draws = torch.from_numpy(uniforms).to(device)
    tokens = torch.zeros((len(prompts), new_tokens), dtype=torch.int64, device=device)
    logprobs = torch.zeros((len(prompts), new_tokens), dtype=torch.float32, device=device)
    cache = DynamicCache(config=model.config)
    fixed = {_cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}
    for position in range(new_tokens):
        logits = model(**rows.inputs(position), **fixed).logits[:, -1]
        token, logprob = _next(logits, draws[rows.index, position], sampling)
        tokens[rows.index, position] = token
        logprobs[rows.index, position] = logprob
        rows.alive &= ~ends[token]
        stop.watch(rows.index, token, rows.alive, position + 1)
        left = int(rows.alive.sum())
        if left == 0:
            break
        rows.ids = token[:, None]
        if 2 * left <= len(token):
            rows.drop_ended(cache)
    return _answers(tokens, logprobs, ends, stop.lengths)


def _next(
    logits: "Float[Tensor, 'B V']", uniform: "Float64[Tensor, ' B']", sampling: Sampling
) -> "tuple[Int64[Tensor, ' B'], Float[Tensor, ' B']]":
    if sampling.temperature == 0.0:
        return greedy(logits)
    return draw(logits, uniform, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)


def _answers(
    tokens: "Int64[Tensor, 'B N']",
    logprobs: "Float[Tensor, 'B N']",
    ends: "Bool[Tensor, ' V']",
    stopped: "Int64[np.ndarray, ' B']",
) -> list[Answer]:
    """Cut each row behind its first ending id, or where a stop string was complete, or not at all."""
    new_tokens = tokens.shape[1]
    ended = ends[tokens]
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, NEVER).tolist()
    answers = []
    for ids, values, eos, stop in zip(tokens.tolist(), logprobs.tolist(), first, stopped.tolist(), strict=True):
        length = min(eos, stop, new_tokens)
        reason = StopReason.EOS if eos == length else StopReason.STOP if stop == length else StopReason.LENGTH
        answers.append(Answer(token_ids=ids[:length], logprobs=values[:length], stop_reason=reason))
    return answers
