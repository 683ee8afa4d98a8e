"""tidemill.weights.word_sums: the checksum of accelerators, against Python's integers."""

import pytest
import torch

from tidemill.weights import word_sums as module
from tidemill.weights.word_sums import TILE, finished, word_sum, word_sums

MASK, SPREAD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def weight(place: int) -> int:
    counted = (place + 1) * SPREAD & MASK
    return ((counted ^ counted >> 32) * SPREAD & MASK) | 1


def slow_word_sum(tensor: torch.Tensor) -> int:
    """The same in Python's integers."""
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    padded = raw + bytes(-len(raw) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    total = weight((1 << 50) + len(raw))
    for number, word in enumerate(words):
        total += word * weight(number % TILE) * weight((1 << 40) + number // TILE)
    return total & MASK


def tensor_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8, 9), (3, 5, 7), (TILE,), (3, 777, 5)])
def test_the_sum_is_the_one_of_pythons_integers(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ON_CPU", 2)
    tensor = (tensor_of(*shape) * 100).to(dtype)
    assert word_sum(tensor) == slow_word_sum(tensor)


def test_sums_of_many_are_those_of_each() -> None:
    tensors = [tensor_of(n) for n in (0, 1, 5, TILE + 3)]
    sums = word_sums(tensors).tolist()
    assert [finished(total, t.nbytes) for total, t in zip(sums, tensors, strict=True)] == [word_sum(t) for t in tensors]


def test_equal_bytes_have_equal_sums_whatever_the_strides() -> None:
    base = tensor_of(6, 10)
    assert word_sum(base.t()) == word_sum(base.t().contiguous())
    assert word_sum(base[1:, 3:]) == word_sum(base[1:, 3:].clone())
    raw = base.view(-1).view(torch.uint8)
    for start in range(1, 5):
        assert word_sum(raw[start:]) == word_sum(raw[start:].clone())


def test_every_single_bit_counts() -> None:
    tensor = tensor_of(33)
    bits = tensor.view(torch.int32)
    seen = {word_sum(tensor)}
    for element in range(33):
        for bit in range(32):
            bits[element] ^= 1 << bit
            seen.add(word_sum(tensor))
            bits[element] ^= 1 << bit
    assert len(seen) == 1 + 33 * 32


def test_no_change_of_a_single_word_goes_unseen_in_any_tile() -> None:
    # What is odd has an inverse: the word's change can be told from the change of the sum.
    places = module._weights(0, TILE, torch.device("cpu"))
    tiles = module._weights(module.TILES_FROM, 5000, torch.device("cpu"))
    assert bool((places & 1).all()) and bool((tiles & 1).all())
    assert len(set(places.tolist())) == TILE and len({*tiles.tolist(), *places.tolist()}) == TILE + 5000


def test_any_two_flipped_signs_give_a_sum_of_their_own() -> None:
    tensor = tensor_of(64)
    seen = {word_sum(tensor)}
    for first in range(64):
        for second in range(first):
            flipped = tensor.clone()
            flipped[[first, second]] *= -1.0
            seen.add(word_sum(flipped))
    assert len(seen) == 1 + 64 * 63 // 2


def test_words_rows_and_tiles_that_change_places_are_seen() -> None:
    tiles = tensor_of(4, TILE)
    moved = {
        "nothing": tiles,
        "words of a tile": tiles[:, torch.randperm(TILE, generator=torch.Generator().manual_seed(0))],
        "neighbours": tiles.view(-1, 2).flip(1),
        "tiles": tiles[[1, 0, 2, 3]],
        "tiles in a circle": tiles.roll(1, 0),
        "all by one word": tiles.view(-1).roll(1),
        "all by one tile and a word": tiles.view(-1).roll(TILE + 1),
        "rows and columns": tiles.t().contiguous(),
        "halves of words": tiles.view(torch.int16).view(-1, 2).flip(1),
    }
    assert len({word_sum(tensor) for tensor in moved.values()}) == len(moved)


def test_a_word_that_swaps_its_place_with_its_tile_is_seen() -> None:
    for place, tile in ((1, 0), (3, 2), (0, 5)):
        words = torch.zeros(6 * TILE, dtype=torch.int32)
        words[tile * TILE + place] = 1
        other = torch.zeros_like(words)
        other[place * TILE + tile] = 1
        assert word_sum(words) != word_sum(other)


def test_a_parcel_left_out_or_sent_twice_is_seen_in_a_tensor_that_lies_across_it() -> None:
    whole = tensor_of(8 * TILE)
    for start, end in ((0, TILE), (TILE, 3 * TILE), (5, 900)):
        stale = whole.clone()
        stale[start:end] = tensor_of(end - start, seed=2)
        doubled = whole.clone()
        doubled[start:end] = whole[-(end - start) :]
        assert len({word_sum(whole), word_sum(stale), word_sum(doubled)}) == 3


def test_zeros_of_different_lengths_differ() -> None:
    assert len({word_sum(torch.zeros(n, dtype=torch.uint8)) for n in range(40)}) == 40


def test_random_changes_never_collide() -> None:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31 - 1, (TILE + 100,), generator=generator).to(torch.int32)
    seen = {word_sum(words)}
    for _ in range(2000):
        changed = words.clone()
        where = torch.randint(
            0, len(words), (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator
        )
        changed[where] ^= torch.randint(1, 2**31 - 1, where.shape, generator=generator).to(torch.int32)
        seen.add(word_sum(changed))
    assert len(seen) == 2001
