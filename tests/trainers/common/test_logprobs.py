"""tidemill.trainers.common.logprobs"""

import pytest
import torch

from tidemill.trainers.common.logprobs import token_logprobs


def naive(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("chunk_elements", [1, 50, 10_000])
def test_values_and_gradient_equal_the_formula_in_float64(temperature: float, chunk_elements: int) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 23, generator=draw) * 5).requires_grad_()
    ids = torch.randint(0, 23, (7,), generator=draw)
    weights = torch.randn(7, generator=draw)
    found = token_logprobs(logits, ids, temperature=temperature, chunk_elements=chunk_elements)
    (found * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = naive(exact, ids, temperature)
    (expected * weights.double()).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_chunks_change_no_bit() -> None:
    logits, ids = torch.randn(9, 30), torch.arange(9)
    whole = token_logprobs(logits, ids, temperature=0.9)
    assert token_logprobs(logits, ids, temperature=0.9, chunk_elements=60).equal(whole)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = (torch.randn(4, 5000) * 3).bfloat16()
    found = token_logprobs(logits, torch.tensor([0, 1, 2, 3]), temperature=1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), naive(logits, torch.arange(4), 1.0), rtol=1e-5, atol=1e-5)


def test_a_bfloat16_gradient_is_the_exact_one_rounded() -> None:
    logits = torch.randn(3, 11).bfloat16().requires_grad_()
    token_logprobs(logits, torch.tensor([1, 5, 10]), temperature=1.0).sum().backward()
    exact = logits.detach().double().requires_grad_()
    naive(exact, torch.tensor([1, 5, 10]), 1.0).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-3)


def test_enormous_logits_give_finite_log_probs() -> None:
    found = token_logprobs(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([1]), temperature=1.0)
    assert found.tolist() == [-2e4]


def test_no_tokens_give_no_log_probs() -> None:
    logits = torch.randn(0, 5, requires_grad=True)
    token_logprobs(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0).sum().backward()
    assert logits.grad is not None
