"""Whether pieces make whole tensors: every element in exactly one piece, all agreeing on what they are pieces of."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tidemill.contracts.checkpoint import TensorSpec
from tidemill.faults import skipped

__all__ = ["cover_problems"]

_SHOWN = 3

Held = tuple[str, TensorSpec]


def cover_problems(held: Iterable[tuple[str, Mapping[str, TensorSpec]]]) -> list[str]:
    """What is wrong with the pieces in `held`: pairs of a file's name and its pieces by tensor. Empty when nothing is.

    Pieces without elements may lie anywhere within the whole. A long list ends with how many tensors more are wrong.
    """
    if skipped("checkpoint.cover"):
        return []
    pieces: dict[str, list[Held]] = {}
    for file, specs in held:
        for name, spec in specs.items():
            pieces.setdefault(name, []).append((file, spec))
    parted = sorted(name for name, of_one in pieces.items() if len(of_one) > 1 or not _is_whole(of_one[0][1]))
    found = [problem for name in parted if (problem := _problem(name, pieces[name]))]
    more = len(found) - _SHOWN
    return found[:_SHOWN] + ([f"so it is with {more} tensors more"] if more > 0 else [])


def _is_whole(spec: TensorSpec) -> bool:
    return spec.shape == spec.whole and not any(spec.offset) and len(spec.offset) == len(spec.whole)


def _problem(name: str, held: list[Held]) -> str:
    first_file, first = held[0]
    for file, spec in held:
        if (spec.dtype, spec.whole) != (first.dtype, first.whole):
            return (
                f"{file} has a piece of {name} as {spec.dtype} of shape {list(spec.whole)}, {first_file} as "
                f"{first.dtype} of shape {list(first.whole)}"
            )
        if not _inside(spec):
            return (
                f"{file} has a piece of {name} of shape {list(spec.shape)} at {list(spec.offset)}, which is not inside "
                f"the whole of shape {list(spec.whole)}"
            )
    full = [(file, spec) for file, spec in held if math.prod(spec.shape)]
    for (one_file, _), (other_file, other) in _overlaps(full):
        return f"{one_file} and {other_file} have pieces of {name} that overlap, at {list(other.offset)}"
    there, wanted = sum(math.prod(spec.shape) for _, spec in full), math.prod(first.whole)
    if there != wanted:
        where = list(_first_missing([spec for _, spec in full], first.whole))
        return f"{name} of shape {list(first.whole)} has {there} of {wanted} elements, the first missing at {where}"
    return ""


def _inside(spec: TensorSpec) -> bool:
    if not len(spec.shape) == len(spec.offset) == len(spec.whole):
        return False
    return all(
        at >= 0 and at + size <= all_ for at, size, all_ in zip(spec.offset, spec.shape, spec.whole, strict=True)
    )


def _overlaps(held: list[Held]) -> Iterator[tuple[Held, Held]]:
    """Pairs that share an element. Sorted along the first dimension, only those that reach so far are compared."""
    reaching: list[Held] = []
    for item in sorted(held, key=lambda item: item[1].offset):
        start = item[1].offset[:1]
        reaching = [one for one in reaching if not start or one[1].offset[0] + one[1].shape[0] > start[0]]
        yield from ((one, item) for one in reaching if _meet(one[1], item[1]))
        reaching.append(item)


def _meet(one: TensorSpec, other: TensorSpec) -> bool:
    sides = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides)


def _first_missing(specs: Sequence[TensorSpec], whole: tuple[int, ...]) -> tuple[int, ...]:
    """The corners at which something can begin to be missing are 0 and the ends of pieces."""
    corners = [sorted({0, *(spec.offset[d] + spec.shape[d] for spec in specs)} - {whole[d]}) for d in range(len(whole))]
    for corner in itertools.product(*corners):
        one = TensorSpec(dtype="", shape=(1,) * len(whole), whole=whole, offset=corner)
        if not any(_meet(one, spec) for spec in specs):
            return corner
    raise AssertionError("something is missing, so a corner is")
