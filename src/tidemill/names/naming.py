"""How a model's weights are called, and cut, on the two sides of the trainer's door.

The trainer holds the tensors of a `transformers` model, which may join in memory what files, vLLM and SGLang have
apart: the experts of a layer, above all. Each Hugging Face tensor is a box of one of the trainer's, its elements in the
same order, and the boxes of a tensor make it up without a gap or an overlap: so nothing is ever copied or computed to
get from one side to the other. Knows names and shapes alone; needs no torch.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cut", "Naming", "Overlap", "Shape", "boxed", "whole"]

Shape = tuple[int, ...]
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The Hugging Face tensor `name`, of `shape`: the box of the trainer's `tensor` that has size `box` at `start`.

    `shape` is `box` without the leading ones that a joined tensor has more.
    """

    name: str
    tensor: str
    start: Shape
    box: Shape
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a piece of the trainer's tensor holds of a cut: the box of size `box` at `start` in the piece.

    In the Hugging Face tensor that is a box of `shape` at `offset`, without rows when the piece holds nothing of it.
    """

    cut: Cut
    start: Shape
    box: Shape
    offset: Shape
    shape: Shape

    def view(self, piece: "Tensor") -> "Tensor":
        """The elements in the piece, in the shape that they have in the Hugging Face tensor."""
        return boxed(piece, self.start, self.box).view(self.shape)


def whole(name: str, shape: Shape, *, called: str = "") -> Cut:
    """All of a tensor as one; `called` is its Hugging Face name where that is another."""
    return Cut(name=called or name, tensor=name, start=(0,) * len(shape), box=shape, shape=shape)


class Naming:
    """The two-way map of one model, tied tensors once: by the trainer's name, the cuts in the order they lie there.

    `shapes` are those of the trainer's tensors, `tied` maps each further name of one to that under which it is kept.
    """

    def __init__(self, cuts: Mapping[str, Sequence[Cut]], shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> None:
        """Raises DataError unless the cuts of each tensor make it up, and no two tensors are called the same."""
        self._cuts = {name: tuple(cuts[name]) for name in shapes}
        self.shapes = dict(shapes)
        self.tied = dict(tied)
        self._by_name: dict[str, Cut] = {}
        for name, shape in shapes.items():
            _check_made_up(name, shape, self._cuts[name])
            for cut in self._cuts[name]:
                if cut.name in self._by_name:
                    raise DataError(
                        f"cannot name the weights of this model: {cut.tensor} and {self._by_name[cut.name].tensor} "
                        f"would both be called {cut.name}"
                    )
                self._by_name[cut.name] = cut

    @property
    def names(self) -> Mapping[str, Cut]:
        """Every Hugging Face tensor, tied ones once, in the model's order."""
        return self._by_name

    def cuts(self, tensor: str) -> tuple[Cut, ...]:
        """What the trainer's tensor is made up of. Raises KeyError for a name that the trainer does not have."""
        return self._cuts[tensor]

    def split(self, tensor: str, value: "Tensor") -> "Iterator[tuple[str, Tensor]]":
        """Every Hugging Face tensor in the trainer's whole tensor, by name, as a view of it."""
        for cut in self._cuts[tensor]:
            yield cut.name, boxed(value, cut.start, cut.box).view(cut.shape)

    def split_all(self, tensors: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """As `split`, of tensors that come one after the other."""
        for name, value in tensors:
            yield from self.split(name, value)

    def specs(self, specs: Mapping[str, tuple[str, Shape]]) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape by Hugging Face name, from the dtypes and shapes of the trainer's tensors."""
        return {cut.name: (specs[name][0], cut.shape) for name in specs for cut in self._cuts[name]}

    def overlaps(self, tensor: str, offset: Shape, shape: Shape) -> Iterator[Overlap]:
        """Of every cut of the trainer's tensor, what lies in the piece of `shape` at `offset`: a rank's, say."""
        for cut in self._cuts[tensor]:
            yield _overlap(cut, offset, shape)


def boxed(value: "Tensor", start: Shape, box: Shape) -> "Tensor":
    """The box of a tensor as a view."""
    for dimension, (at, size) in enumerate(zip(start, box, strict=True)):
        if size != value.shape[dimension]:
            value = value.narrow(dimension, at, size)
    return value


def _overlap(cut: Cut, offset: Shape, shape: Shape) -> Overlap:
    spans = [
        (max(at, mine), max(max(at, mine), min(at + size, mine + have)))
        for at, size, mine, have in zip(cut.start, cut.box, offset, shape, strict=True)
    ]
    box = tuple(end - first for first, end in spans)
    within = tuple(min(first - at, size) for (first, _), at, size in zip(spans, cut.start, cut.box, strict=True))
    more = len(box) - len(cut.shape)
    return Overlap(
        cut=cut,
        start=tuple(min(first - mine, have) for (first, _), mine, have in zip(spans, offset, shape, strict=True)),
        box=box,
        offset=within[more:],
        shape=box[more:] if math.prod(box[:more]) else (0, *box[more + 1 :]),
    )


def _check_made_up(name: str, shape: Shape, cuts: Sequence[Cut]) -> None:
    inside = all(
        len(cut.start) == len(cut.box) == len(shape)
        and all(at >= 0 and at + size <= have for at, size, have in zip(cut.start, cut.box, shape, strict=True))
        and math.prod(cut.shape) == math.prod(cut.box)
        for cut in cuts
    )
    if not inside or sum(math.prod(cut.box) for cut in cuts) != math.prod(shape) or _meet(cuts):
        raise DataError(
            f"cannot name the weights of this model: {name} of shape {list(shape)} is not made up of "
            f"{', '.join(f'{cut.name} {list(cut.shape)}' for cut in cuts[:_SHOWN]) or 'anything'}; its config.json is "
            "of another model, or this version of transformers joins weights in another way"
        )


def _meet(cuts: Sequence[Cut]) -> bool:
    """Whether two boxes share an element; those of one model are in order, so that neighbours tell."""
    return any(math.prod(_overlap(one, other.start, other.box).box) > 0 for one, other in itertools.pairwise(cuts))
