"""Which token comes next: filters, log-probabilities, and draws that depend on nothing but seed, key and position.

Letters: `B` rows, `V` vocabulary, `N` new tokens. A row's uniforms come from a counter (splitmix64 over the position,
keyed by a hash of seed and request key), so that no generator state exists that a batch, an order or a crash could
change; the token is found by inverse CDF, one vectorised draw for all rows.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (the mixing function).
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64, Int64, UInt64
    from torch import Tensor

__all__ = ["distribution", "draw", "filtered", "greedy", "pick", "row_keys", "uniforms", "uniforms_at"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def row_keys(seed: int, keys: Sequence[str]) -> "UInt64[np.ndarray, ' B']":
    """The first 8 bytes of blake2b over seed and request key, for each row."""
    digests = b"".join(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def uniforms(keys: "UInt64[np.ndarray, ' B']", count: int) -> "Float64[np.ndarray, 'B N']":
    """Uniforms in the open interval (0, 1) for positions 0 to `count` - 1 of each row, with 52 bits each."""
    return uniforms_at(keys[:, None], np.arange(count)[None, :])


def uniforms_at(
    keys: "UInt64[np.ndarray, '...']", positions: "Int64[np.ndarray, '...']"
) -> "Float64[np.ndarray, '...']":
    """Of each key the uniform for its position, from 0 on; the two broadcast."""
    mixed = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    mixed ^= mixed >> np.uint64(31)
    uniform: np.ndarray = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return uniform


def filtered(logits: "Float[Tensor, 'B V']", *, top_k: int, top_p: float) -> "Float[Tensor, 'B V']":
    """Logits with everything that top-k, and then top-p of what is left, drop at minus infinity.

    Of equal logits those of the lower ids are kept. Top-p keeps the fewest tokens whose mass reaches `top_p`, and at
    least one. `top_k` 0 and `top_p` 1 keep all.
    """
    if top_k == 0 and top_p >= 1.0:
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < logits.shape[-1]:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1.0:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        before[:, 0] = 0.0
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)


def greedy(logits: "Float[Tensor, 'B V']") -> "tuple[Int64[Tensor, ' B'], Float32[Tensor, ' B']]":
    """The likeliest ids, and their log-probs in nats, untempered, in float32."""
    logprobs = logits.float().log_softmax(-1)
    tokens = logprobs.argmax(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def draw(
    logits: "Float[Tensor, 'B V']",
    uniform: "Float64[Tensor, ' B']",
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> "tuple[Int64[Tensor, ' B'], Float32[Tensor, ' B']]":
    """Ids drawn, and their log-probs in nats under the very distribution drawn from, in float32."""
    logprobs = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = pick(logprobs, uniform)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def distribution(
    logits: "Float[Tensor, 'B V']", *, temperature: float, top_k: int, top_p: float
) -> "Float32[Tensor, 'B V']":
    """Log-probs of every token, in nats, minus infinity where it is dropped."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return filtered(scaled, top_k=top_k, top_p=top_p).log_softmax(-1)


def pick(logprobs: "Float32[Tensor, 'B V']", uniform: "Float64[Tensor, ' B']") -> "Int64[Tensor, ' B']":
    """Ids by inverse CDF, summed in float64: in float32 a vocabulary of 150,000 loses the tail.

    Ids of the vocabulary, also where log-probs are not numbers: what is told of those is no number either.
    """
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # right=True finds the first sum that exceeds the target: a token of probability 0 adds nothing and is passed over.
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return found.clamp_(max=logprobs.shape[-1] - 1)
