"""Where each weight lies in somebody else's model: learned once from that model's own loader, then only copied.

The loader is given one weight at a time, without memory, and every copy that it makes into a parameter is noted instead
of made. So fused, tied, padded and stacked parameters are found from whoever made them, in any architecture. A plan is
used only if it accounts for every element: each of a weight goes to one place, each of a parameter has one source or is
filled with a constant.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidemill.errors import WeightSyncError
from tidemill.weights.copying import copy_weight

__all__ = ["CopyPlan", "bake"]

_aten = torch.ops.aten

Put = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Copy:
    """The elements of a weight of `shape`, `stride` and `start` in it, row-major, and the view that they belong in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    target: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """All of one weight: `whole` is its one view in the model, where there is just one."""

    shape: tuple[int, ...]
    copies: tuple[_Copy, ...]
    whole: Tensor | None


class CopyPlan:
    """The views stay right while their storages come and go, as long as nobody puts others in their place."""

    def __init__(self, places: Mapping[str, _Place], fills: Sequence[tuple[Tensor, float]]) -> None:
        self._places = dict(places)
        self._fills = tuple(fills)

    @property
    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each weight, by name."""
        return {name: place.shape for name, place in self._places.items()}

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants that pad parameters, which no weight brings."""
        for target, value in self._fills:
            target.fill_(value)

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor, dtype: torch.dtype, put: Put = copy_weight) -> None:
        """Put a weight in its place by `put(target, source)`, rounded to `dtype` on the way.

        Raises WeightSyncError for another shape.
        """
        place = self._places[name]
        if tuple(tensor.shape) != place.shape:
            raise WeightSyncError(
                f"cannot load {name} into the engine: it came as {tuple(tensor.shape)} and should be {place.shape}; "
                f"trainer and engine must be built from the same model folder"
            )
        if place.whole is not None and place.whole.dtype == dtype:
            put(place.whole, tensor)
            return
        rows = tensor.to(dtype).contiguous()
        for copy in place.copies:
            put(copy.target, rows.as_strided(copy.shape, copy.stride, rows.storage_offset() + copy.start))

    @torch.no_grad()
    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight as it lies in the model now, in `dtype`: a view where it lies there in one piece."""
        place = self._places[name]
        if place.whole is not None:
            return place.whole.detach().to(dtype)
        found = torch.empty(place.shape, dtype=dtype, device=place.copies[0].target.device)
        for copy in place.copies:
            found.as_strided(copy.shape, copy.stride, copy.start).copy_(copy.target)
        return found


def bake(
    parameters: Mapping[str, Tensor],
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> CopyPlan:
    """The plan by which weights of `shapes` go into `parameters`, as `load` would put them.

    Nothing is written. Raises WeightSyncError, naming weight or parameter, for what plain copies cannot do.
    """
    recorder = _Recorder(parameters)
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=dtype, device="meta")
        recorder.begin(name, weight)
        try:
            with recorder:
                load([(name, weight)])
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"cannot find where the engine keeps {name} {list(shape)}: its own loader fails with "
                f"{type(error).__name__}: {error}; this model cannot be used with this engine"
            ) from error
    places = {name: _place(name, shapes[name], recorder.copies[name]) for name in shapes}
    for name, parameter in recorder.distinct.items():
        targets = [copy.target for place in places.values() for copy in place.copies if _same(copy.target, parameter)]
        _check_covered(name, parameter, targets, [fill for fill, _ in recorder.fills if _same(fill, parameter)])
    return CopyPlan(places, recorder.fills)


def _same(one: Tensor, other: Tensor) -> bool:
    return _storage(one) == _storage(other)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a loader copies or fills into parameters, instead of doing it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: dict[str, list[_Copy]] = {}
        self.fills: list[tuple[Tensor, float]] = []
        self._by_storage: dict[int, str] = {}
        for name, parameter in parameters.items():
            self._by_storage.setdefault(_storage(parameter), name)
        # One of each storage: a tied parameter has two names.
        self.distinct = {name: parameters[name] for name in self._by_storage.values()}
        self._name, self._weight = "", torch.empty(0, device="meta")

    def begin(self, name: str, weight: Tensor) -> None:
        """What comes now is of this weight."""
        self._name, self._weight = name, weight
        self.copies[name] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if func is _aten._to_copy.default and target is not None and _same(target, self._weight):
            return target  # to a device or dtype: where it ends is what counts
        if target is None or _storage(target) not in self._by_storage or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func is _aten.copy_.default:
            self._note_copy(target, args[1])
        elif func in (_aten.fill_.Scalar, _aten.zero_.default):
            self.fills.append((_live(target), float(args[1]) if len(args) > 1 else 0.0))
        else:
            raise WeightSyncError(
                f"cannot find where the engine keeps {self._name}: its loader changes "
                f"{self._by_storage[_storage(target)]} by {func}, which is no copy; this model cannot be used with "
                "this engine"
            )
        return target

    def _note_copy(self, target: Tensor, source: Tensor) -> None:
        if not _same(source, self._weight):
            raise WeightSyncError(
                f"cannot find where the engine keeps {self._name}: its loader computes what it puts into "
                f"{self._by_storage[_storage(target)]}; this model cannot be used with this engine"
            )
        source = source.expand(target.shape)
        self.copies[self._name].append(
            _Copy(
                shape=tuple(source.shape),
                stride=source.stride(),
                start=int(source.storage_offset()),
                target=_live(target),
            )
        )


def _live(target: Tensor) -> Tensor:
    return target.detach()


def _place(name: str, shape: tuple[int, ...], copies: Sequence[_Copy]) -> _Place:
    """Raises WeightSyncError unless each element of the weight is copied, and once."""
    spans = [_Span.of(copy.shape, copy.stride, copy.start) for copy in copies]
    if not _tiles(spans, math.prod(shape)):
        took = sum(math.prod(copy.shape) for copy in copies)
        raise WeightSyncError(
            f"cannot find where the engine keeps {name} {list(shape)}: its loader takes {took} "
            f"elements, and not each of its {math.prod(shape)} once; this model cannot be used with this engine"
        )
    whole = copies[0].target.view(shape) if len(copies) == 1 and _whole(copies[0], shape) else None
    return _Place(shape=tuple(shape), copies=tuple(copies), whole=whole)


def _whole(copy: _Copy, shape: tuple[int, ...]) -> bool:
    """Whether the target holds the weight's elements in its own order, so that it can be viewed as the weight."""
    span = _Span.of(copy.shape, copy.stride, copy.start)
    return span.solid and (copy.target.is_contiguous() or copy.shape == tuple(shape))


def _check_covered(name: str, parameter: Tensor, targets: Sequence[Tensor], fills: Sequence[Tensor]) -> None:
    """Raises WeightSyncError unless each element of the parameter's storage is copied to at most once, or filled."""
    first = parameter.storage_offset()
    spans = [_Span.of(target.shape, target.stride(), target.storage_offset() - first) for target in targets]
    filled = [_Span.of(fill.shape, fill.stride(), fill.storage_offset() - first) for fill in fills]
    if _tiles([*spans, *filled], parameter.numel()):
        return
    times = torch.zeros(parameter.numel(), dtype=torch.int32, device="cpu")
    for span in spans:
        times.as_strided(span.shape, span.stride, span.start).add_(1)
    if int((times > 1).sum()):
        raise WeightSyncError(
            f"cannot plan copies into the engine's {name}: {int((times > 1).sum())} of its elements have two sources; "
            "this model cannot be used with this engine"
        )
    for span in filled:
        times.as_strided(span.shape, span.stride, span.start).fill_(1)
    if int((times == 0).sum()):
        raise WeightSyncError(
            f"cannot plan copies into the engine's {name}: {int((times == 0).sum())} of its {parameter.numel()} "
            "elements have no source among the weights of the model folder; this model cannot be used with this engine"
        )


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Elements of a storage. `solid`: they are neighbours, in order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    solid: bool

    @property
    def size(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int], start: Any) -> "_Span":
        shape, stride = tuple(shape), tuple(stride)
        expected, solid = 1, True
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            solid = solid and (size == 1 or step == expected)
            expected *= size
        return cls(shape=shape, stride=stride, start=int(start), solid=solid)


def _tiles(spans: Sequence[_Span], size: int) -> bool:
    """Whether they make up `size` elements, each once."""
    if all(span.solid for span in spans):
        at = 0
        for span in sorted(spans, key=lambda span: (span.start, span.size)):
            if span.start != at and span.size:
                return False
            at += span.size
        return at == size
    if any(step == 0 and count > 1 for span in spans for count, step in zip(span.shape, span.stride, strict=True)):
        return False  # one element, broadcast
    times = torch.zeros(size, dtype=torch.int32, device="cpu")
    for span in spans:
        times.as_strided(span.shape, span.stride, span.start).add_(1)
    return bool((times == 1).all())
