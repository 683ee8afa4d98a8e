"""Log-probabilities of given tokens from logits, in float32, without a second copy of the logits.

`M` tokens, `V` words. The logits of a micro-batch are its largest tensor (a word list of 150,000 at 8,000 tokens is
4.6 GiB in float32): forward and backward go through them in chunks, and keep only one float32 number a token besides.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["token_logprobs"]

_CHUNK_ELEMENTS = 1 << 26  # 256 MiB of float32


def token_logprobs(
    logits: Float[Tensor, "M V"],
    token_ids: Int64[Tensor, " M"],
    *,
    temperature: float,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> Float[Tensor, " M"]:
    """log softmax(logits / temperature) at the tokens, in nats, float32 whatever the logits are.

    The gradient is exact, and comes in the dtype of the logits. It cannot be differentiated twice.
    """
    rows = max(1, chunk_elements // logits.shape[1])
    result: Tensor = _TokenLogprobs.apply(logits, token_ids, temperature, rows)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, rows: int) -> Tensor:
        normalizers = torch.empty(len(token_ids), dtype=torch.float32, device=logits.device)
        for part, out in zip(torch.split(logits, rows), torch.split(normalizers, rows), strict=True):
            torch.logsumexp(part.float().div(temperature), dim=-1, out=out)
        chosen = logits.gather(1, token_ids[:, None])[:, 0].float().div(temperature)
        ctx.save_for_backward(logits, token_ids, normalizers)
        ctx.temperature, ctx.rows = temperature, rows
        return chosen - normalizers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, token_ids, normalizers = ctx.saved_tensors
        scale = grad.float().div(ctx.temperature)[:, None]
        result = torch.empty_like(logits)
        chunks = (torch.split(tensor, ctx.rows) for tensor in (logits, normalizers[:, None], scale, result))
        for part, normalizer, factor, out in zip(*chunks, strict=True):
            out.copy_(part.float().div(ctx.temperature).sub_(normalizer).exp_().mul_(-factor))
        # The gradient at the token itself, (1 - p), is rounded once more in bfloat16; all else is rounded once.
        result.scatter_add_(1, token_ids[:, None], scale.to(result.dtype))
        return result, None, None, None
