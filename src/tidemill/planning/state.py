"""Exact bytes of what outlives a step: the trainer's state on one rank, its host pages, and the engine's weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.planning.decoder import Decoder, Shape
from tidemill.planning.model_folder import Model

__all__ = [
    "Arena",
    "RankState",
    "arena_of",
    "cache_bytes",
    "engine_host_bytes",
    "engine_weights",
    "page_size",
    "rank_state",
]

MASTER_BYTES = 4
# Where units begin in a slab of the trainer's, weights in the engine's, and slabs and spare pages in host memory.
_UNIT, _WEIGHT, _PAGE = 512, 256, 4096


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Of the rank that has most. `slabs` are the pieces of device memory that sleep copies to the host.

    `elements` are those of the rank's masters, `largest` those of its largest.
    """

    weights: int
    moments: int
    gradients: int
    elements: int
    largest: int
    slabs: tuple[int, ...]

    @property
    def kept(self) -> int:
        """Weights and moments: what survives sleep."""
        return self.weights + self.moments

    @property
    def footprint(self) -> int:
        """What a budget counts for the trainer: gradients too, whether they are there or not."""
        return self.kept + self.gradients


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Host memory of one rank: pages that hold its state, and spare ones for those that a save still reads."""

    pages: int
    spares: int


def page_size(asked: int) -> int:
    """Bytes of a page where `asked` are set: so many that an element of any dtype lies on one."""
    return _aligned(asked, _UNIT)


def rank_state(model: Model, *, shards: int, page_bytes: int) -> RankState:
    """Buffers, masters and AdamW's two moments, float32, cut along the first dimension over `shards` ranks."""
    shares = [_share(shape, shards) for shape in model.shapes.values()]
    masters = [MASTER_BYTES * math.prod(share) for share in shares]
    buffers = [MASTER_BYTES * math.prod(shape) for shape in model.buffers]
    weights, moments = [*buffers, *masters], [*masters, *masters]
    return RankState(
        weights=sum(map(_unit, weights)),
        moments=sum(map(_unit, moments)),
        gradients=sum(masters),
        elements=sum(masters) // MASTER_BYTES,
        largest=max(masters) // MASTER_BYTES,
        slabs=(*_filled(weights, page_bytes), *_filled(moments, page_bytes)),
    )


def _share(shape: Shape, shards: int) -> Shape:
    """Every rank but the last ones has as many rows; a single number is whole on each."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else ()


def _unit(size: int) -> int:
    return _aligned(size, _UNIT)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _filled(sizes: Iterable[int], page_bytes: int) -> list[int]:
    """Slabs of at most `page_bytes`, unless one unit is larger, filled in order."""
    slabs: list[int] = []
    for size in sizes:
        if not slabs or slabs[-1] + size > page_bytes:
            slabs.append(0)
        slabs[-1] += _unit(size)
    return slabs


def arena_of(slabs: Sequence[int], *, page_bytes: int, spare_bytes: int | None) -> Arena:
    """Pages of `page_bytes`, and spare ones in `spare_bytes`; None is a tenth of the state, and two pages at least."""
    start = min(_PAGE, page_bytes & -page_bytes)
    largest = _aligned(min(max(slabs, default=0), page_bytes), start)
    room = max(2 * largest, sum(slabs) // 10) if spare_bytes is None else spare_bytes
    count = room // largest if largest else 0
    return Arena(pages=sum(_aligned(slab, start) for slab in slabs), spares=count * largest)


def engine_weights(model: Model, *, itemsize: int) -> int:
    """One slab with every parameter in the engine's dtype, and the buffers, which are float32."""
    sizes = [itemsize * math.prod(shape) for shape in model.shapes.values()]
    sizes += [MASTER_BYTES * math.prod(shape) for shape in model.buffers]
    return sum(_aligned(size, _WEIGHT) for size in sizes)


def engine_host_bytes(model: Model) -> int:
    """The buffers, of which a copy stays on the host."""
    return sum(MASTER_BYTES * math.prod(shape) for shape in model.buffers)


def cache_bytes(decoder: Decoder, *, positions: int, itemsize: int) -> int:
    """Keys and values of `positions` cached positions in all layers."""
    return 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * itemsize * positions
