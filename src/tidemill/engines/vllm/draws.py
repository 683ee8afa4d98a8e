"""Draws of tokens inside vLLM that depend on seed, request key and position alone, as the transformers engine's do.

vLLM keeps one random generator a request: a kernel a row, draws that change with what else is in a batch that is cut
short, and none on a CPU for a prompt that comes in chunks. Here a row's uniform comes from a counter: its position.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.engines.common.sampling import distribution, pick, uniforms_at

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CountedDraws", "OwnDraws"]


class CountedDraws:
    """Stands in for the last step of vLLM's first model runner's sampler, for the requests that `begin` names."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._native = runner.sampler.topk_topp_sampler.forward
        self._keys: dict[str, int] = {}
        self._top_k, self._top_p = 0, 1.0
        runner.sampler.topk_topp_sampler.forward = self.forward

    def begin(self, *, top_k: int, top_p: float) -> None:
        """Requests that come are sampled so."""
        self._keys, self._top_k, self._top_p = {}, top_k, top_p

    def add(self, request: str, key: int) -> None:
        """`request`, by vLLM's inner name, draws by `key`, a number below 2^64."""
        self._keys[request] = key

    def forward(self, logits: "Tensor", generators: Any, k: Any, p: Any) -> "tuple[Tensor, Tensor | None]":
        """Ids, and log-probs of all tokens. A batch that is none of ours, of a warm-up say, is vLLM's own affair."""
        batch = self._runner.input_batch
        rows = batch.req_ids[: len(logits)]
        if len(rows) != len(logits) or not all(row in self._keys for row in rows):
            found: tuple[Tensor, Tensor | None] = self._native(logits, generators, k, p)
            return found
        # The length behind this step, of which the prompt is no part: the new token's place in its answer. Rows that
        # are still within their prompt have a negative one, and are thrown away.
        lengths = self._runner.optimistic_seq_lens_cpu[: len(rows)].numpy()
        places = np.maximum(lengths.astype(np.int64) - batch.num_prompt_tokens[: len(rows)], 0)
        keys = np.array([self._keys[row] for row in rows], dtype=np.uint64)
        uniform = torch.from_numpy(uniforms_at(keys, places)).to(logits.device, non_blocking=True)
        logprobs = distribution(logits, temperature=1.0, top_k=self._top_k, top_p=self._top_p)
        return pick(logprobs, uniform), logprobs


class OwnDraws:
    """Those of vLLM's second model runner, whose kernel draws by a request's seed and the token's position."""

    def begin(self, *, top_k: int, top_p: float) -> None:
        """Nothing to prepare."""

    def add(self, request: str, key: int) -> None:
        """The request's seed says it all."""
