import hashlib
import math

import numpy as np
import pytest
import torch

from tidemill.engines.common.sampling import draw, filtered, greedy, pick, row_keys, uniforms, uniforms_at

MASK = (1 << 64) - 1


def splitmix(key: int, position: int) -> float:
    """The slow twin: Python's integers, one draw at a time."""
    mixed = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    mixed ^= mixed >> 31
    return ((mixed >> 12) + 0.5) / 2**52


def test_uniforms_are_those_of_the_slow_twin() -> None:
    keys = row_keys(7, ["0:a#0", "0:a#1", "1:é#0"])
    expected = int.from_bytes(hashlib.blake2b("7/1:é#0".encode(), digest_size=8).digest(), "little")
    assert int(keys[2]) == expected
    drawn = uniforms(keys, 5)
    assert drawn.tolist() == [[splitmix(int(key), position) for position in range(5)] for key in keys]


def test_a_draw_depends_on_its_row_and_position_alone() -> None:
    together = uniforms(row_keys(0, ["a", "b", "c"]), 9)
    assert np.array_equal(uniforms(row_keys(0, ["b"]), 4)[0], together[1, :4])
    assert not np.array_equal(uniforms(row_keys(1, ["b"]), 4)[0], together[1, :4])


def test_draws_are_uniform_over_rows_and_over_positions() -> None:
    drawn = uniforms(row_keys(3, [f"0:{row}#{sample}" for row in range(250) for sample in range(8)]), 100)
    assert drawn.min() > 0.0 and drawn.max() < 1.0
    for cut in (drawn.ravel(), drawn[:, 0], drawn[0], drawn[:, 7]):
        counts = np.histogram(cut, bins=10, range=(0, 1))[0]
        chi_square = float(((counts - len(cut) / 10) ** 2 / (len(cut) / 10)).sum())
        assert chi_square < 27.9, "9 degrees of freedom, one in a thousand"
    neighbours = np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(drawn.size)


def test_sampled_frequencies_follow_the_probabilities() -> None:
    rows = 40_000
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0, -torch.inf, 0.5]]).expand(rows, -1)
    uniform = torch.from_numpy(uniforms(row_keys(0, [str(row) for row in range(rows)]), 1)[:, 0])
    tokens, logprobs = draw(logits, uniform, temperature=0.7, top_k=0, top_p=1.0)
    expected = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[4] == 0
    kept = expected > 0
    chi_square = ((counts - rows * expected)[kept] ** 2 / (rows * expected[kept])).sum()
    assert float(chi_square) < 18.5, "4 degrees of freedom, one in a thousand"
    assert torch.allclose(logprobs, expected.log()[tokens])


def test_a_draw_is_the_first_token_whose_sum_exceeds_the_uniform() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 50) * 3
    uniform = torch.rand(200, dtype=torch.float64)
    tokens, _ = draw(logits, uniform, temperature=1.3, top_k=0, top_p=1.0)
    for row, target, token in zip((logits / 1.3).log_softmax(-1).exp(), uniform.tolist(), tokens.tolist(), strict=True):
        total, expected = 0.0, -1
        while total <= target * float(row.double().sum()):
            expected += 1
            total += float(row[expected])
        assert token == expected


@pytest.mark.parametrize("extreme", [2.0**-53, 1.0 - 2.0**-53])
def test_the_extremes_of_the_uniform_never_leave_the_vocabulary_or_hit_a_dropped_token(extreme: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(500, 37) * 5
    logits[:, [0, 36]] = -torch.inf
    tokens, logprobs = draw(
        logits, torch.full((500,), extreme, dtype=torch.float64), temperature=1.0, top_k=0, top_p=1.0
    )
    assert int(tokens.min()) >= 1 and int(tokens.max()) <= 35
    assert torch.isfinite(logprobs).all()


def naive_kept(row: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: top_k or None]
    mass = [math.exp(row[token]) for token in order]
    kept: set[int] = set()
    for token in order:
        if sum(math.exp(row[other]) for other in kept) >= top_p * sum(mass):
            break
        kept.add(token)
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 0.5), (0, 0.95), (7, 0.6), (100, 0.01)])
def test_filters_keep_what_the_slow_twin_keeps(top_k: int, top_p: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(50, 20)
    kept = filtered(logits, top_k=top_k, top_p=top_p)
    for row, result in zip(logits.tolist(), kept, strict=True):
        assert set(torch.isfinite(result).nonzero()[:, 0].tolist()) == naive_kept(row, top_k, top_p)
    assert torch.equal(torch.where(torch.isfinite(kept), kept, logits), logits)


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    assert torch.isfinite(filtered(torch.zeros(1, 6), top_k=2, top_p=1.0))[0].tolist() == [True] * 2 + [False] * 4


def test_greedy_is_untempered() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == [1]
    assert torch.equal(logprobs, logits.log_softmax(-1)[:, 1])


def test_log_probs_are_float32_whatever_the_models_dtype() -> None:
    logits = torch.randn(2, 9).bfloat16()
    for logprobs in (greedy(logits)[1], draw(logits, torch.rand(2).double(), temperature=1, top_k=3, top_p=0.9)[1]):
        assert logprobs.dtype == torch.float32


def test_a_uniform_can_be_had_for_any_position_of_any_row_alone() -> None:
    keys = row_keys(5, ["a", "b", "c"])
    every = uniforms(keys, 20)
    assert uniforms_at(keys, np.array([0, 7, 19])).tolist() == [every[0, 0], every[1, 7], every[2, 19]]


def test_a_row_that_is_no_distribution_still_draws_an_id_of_the_vocabulary() -> None:
    logprobs = torch.full((3, 7), torch.nan)
    logprobs[1] = torch.zeros(7).log_softmax(-1)
    assert pick(logprobs, torch.full((3,), 0.999, dtype=torch.float64)).tolist() == [6, 6, 6]
