"""What some ranks saved others load, through files: every layout to every other, and layouts that no trainer here has.

Bit for bit after gathering. Modules: tidemill.checkpoint.stored_tensor, tidemill.checkpoint.ranks.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.pieces import Array, cut, piece
from tests.trainers.fsdp.rank_service import Groups, RankGroup, RankService, alone
from transformers import AutoModelForCausalLM, Qwen3Config

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.contracts.checkpoint import Saved, Snapshot, TensorBytes
from tidemill.contracts.state import Cursor, RunState
from tidemill.testing.suites.trainer import ragged_batch

Layout = tuple[int, int]
LAYOUTS: list[Layout] = [(1, 1), (2, 1), (4, 1), (4, 2)]
"""Ranks, and copies of the model that they are in."""
CLIP = ClipLoss(low=0.2, high=0.2)
Shards = list[dict[str, TensorBytes]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No number of ranks divides it: 33 words, layers of 5 rows."""
    config = Qwen3Config(
        vocab_size=33, hidden_size=24, intermediate_size=5, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("uneven")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Open:
    """Ranks of every layout; those of one size share their processes, so one of them is open at a time."""

    def __init__(self, model: Path) -> None:
        self._model, self._groups = model, Groups()
        self._alone = alone(model)
        self._open: dict[int, tuple[Layout, RankGroup]] = {}

    def of(self, layout: Layout) -> "RankGroup | RankService":
        """Those of `layout`, built unless they are there."""
        ranks, replicas = layout
        if ranks == 1:
            return self._alone
        if self._open.get(ranks, ((0, 0), None))[0] != layout:
            self._open[ranks] = layout, self._groups.start(self._model, ranks, replicas=replicas)
        return self._open[ranks][1]

    def pieces(self, layout: Layout) -> list[tuple[dict[str, TensorBytes], dict[str, Any]]]:
        """By rank, and what else each says."""
        ranks = self.of(layout)
        return ranks.call("pieces") if isinstance(ranks, RankGroup) else [ranks.pieces()]

    def load(self, layout: Layout, saved: Saved) -> None:
        """On every rank."""
        ranks = self.of(layout)
        if isinstance(ranks, RankGroup):
            ranks.call("load", saved)
        else:
            ranks.load(saved)

    def close(self) -> None:
        """End all."""
        self._alone.close()
        self._groups.close()


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[Open]:
    found = Open(model)
    yield found
    found.close()


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shards, Mapping[str, Any]], Saved]:
    """A whole checkpoint of shards, and it read back."""
    folder, steps = tmp_path_factory.mktemp("checkpoints"), itertools.count(1)
    committer = Committer(folder=folder, attempt=1, identity={}, settings={}, retention={})

    def written(shards: Shards, extra: Mapping[str, Any]) -> Saved:
        state = RunState(step=next(steps), attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
        held = [LocalShard(shard) for shard in shards if shard]
        path = committer.commit(stage(state, {"trainer": Snapshot(shards=held, extra=extra)}), lambda count: None)
        return read_checkpoint(path, step=state.step).parts["trainer"]

    return written


def joined(shards: Sequence[Mapping[str, TensorBytes]]) -> dict[str, Array]:
    """Gathered: whole arrays of the pieces, each element of exactly one."""
    wholes: dict[str, Any] = {}
    for name, one in (item for shard in shards for item in shard.items()):
        spec = one.spec
        whole = wholes.setdefault(name, np.full(spec.whole, np.nan, np.float32))
        box = tuple(slice(low, low + size) for low, size in zip(spec.offset, spec.shape, strict=True))
        assert np.isnan(whole[box]).all()
        whole[box] = np.frombuffer(one.data, np.float32).reshape(spec.shape)
    assert not any(np.isnan(whole).any() for whole in wholes.values())
    return wholes


def equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.fixture(scope="module")
def saves(ranks: Open, write: Callable[[Shards, Mapping[str, Any]], Saved]) -> dict[Layout, tuple[Saved, Any]]:
    """Of each layout, after a step of its own: what was saved, and what it was, gathered."""
    found = {}
    for seed, layout in enumerate(LAYOUTS):
        ranks.of(layout).step(ragged_batch(seed=seed, rows=6, longest=20), CLIP)
        taken = ranks.pieces(layout)
        found[layout] = write([pieces for pieces, _ in taken], taken[0][1]), joined([pieces for pieces, _ in taken])
    return found


@pytest.mark.parametrize("now", [*reversed(LAYOUTS)])
def test_c16_what_every_layout_saved_this_one_loads_and_gathers_to_the_same_bits(
    ranks: Open, saves: dict[Layout, tuple[Saved, Any]], now: Layout
) -> None:
    """C16: 1, 2 and 4 ranks, and 2 copies over 2 ranks each."""
    for before, (saved, wanted) in saves.items():
        ranks.load(now, saved)
        taken = ranks.pieces(now)
        assert equal(joined([pieces for pieces, _ in taken]), wanted), before
        assert all(extra["optimizer_steps"] == 1 and extra["updates"] == 1 for _, extra in taken)
        assert (taken[0][1]["ranks"], taken[0][1]["replicas"]) == now


def boxes_of(array: Array, cuts: Sequence[Sequence[int]]) -> Iterator[TensorBytes]:
    """The boxes of a grid: `cuts` are the inner borders along each dimension."""
    sides = [[0, *inner, side] for inner, side in zip(cuts, array.shape, strict=True)]
    for corners in itertools.product(*(itertools.pairwise(borders) for borders in sides)):
        yield piece(array, [low for low, _ in corners], [high - low for low, high in corners])


def columns(array: Array) -> list[TensorBytes]:
    """As a row-parallel layer is cut: along dimension 1, into pieces of different widths."""
    side = array.shape[1] if array.ndim > 1 else 0
    inner = [[], [side // 3, side - 1]] if side > 3 else [[] for _ in array.shape]
    return list(boxes_of(array, inner))


def uneven_rows(array: Array) -> list[TensorBytes]:
    """As a column-parallel layer is cut, the first rank with most of it."""
    side = array.shape[0] if array.ndim else 0
    inner = [sorted({side - 2, side - 1})] if side > 2 else [[]] * min(array.ndim, 1)
    return list(boxes_of(array, [*inner, *([] for _ in array.shape[1:])]))


def grid(array: Array) -> list[TensorBytes]:
    """Cut along every dimension."""
    return list(boxes_of(array, [[side // 2] if side > 1 else [] for side in array.shape]))


def changing_places(array: Array) -> list[TensorBytes]:
    """Rows in blocks as fused projections interleave them, and no two tensors in the same order of ranks."""
    side = array.shape[0] if array.ndim else 0
    blocks = (
        list(boxes_of(array, [list(range(1, side))[:5], *([] for _ in array.shape[1:])]))
        if side
        else [*boxes_of(array, [])]
    )
    random.Random(array.size).shuffle(blocks)
    return blocks


@pytest.mark.parametrize("split", [columns, uneven_rows, grid, changing_places])
def test_layouts_of_other_trainers_are_loaded_by_the_same_slices(
    ranks: Open,
    saves: dict[Layout, tuple[Saved, Any]],
    write: Callable[[Shards, Mapping[str, Any]], Saved],
    split: Callable[[Array], list[TensorBytes]],
) -> None:
    saved, arrays = saves[2, 1]
    shards: Shards = []
    for name, array in arrays.items():
        for number, one in enumerate(split(array)):
            shards += [{}] if number == len(shards) else []
            shards[number][name] = one
    assert len(shards) > 1
    stored = write(shards, saved.extra)
    for now in [(4, 1), (2, 1), (1, 1)]:
        ranks.load(now, stored)
        assert equal(joined([pieces for pieces, _ in ranks.pieces(now)]), arrays), now


def test_what_rows_were_saved_of_can_be_read_by_columns(saves: dict[Layout, tuple[Saved, Any]]) -> None:
    saved, arrays = saves[4, 1]
    wide = {name: array for name, array in arrays.items() if array.ndim == 2}
    assert len(wide) > 10
    for name, array in wide.items():
        rows, width = array.shape
        for first in range(0, width, 7):
            offset, shape = (0, first), (rows, min(7, width - first))
            assert bytes(saved.tensors[name].read(offset, shape)) == cut(array, offset, shape)
