"""Making the engine hold the trainer's weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.contracts.residency import Tenant
from tidemill.contracts.state import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EVERY_WEIGHT", "Sample", "Samples", "WeightReceiver", "WeightSource", "WeightSync"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Which weights of a hand-over are compared by checksum: of all names in order every `of`th, from `part` on.

    `of` 0 is none of them. `words` asks for the checksum of accelerators, of weights in host memory too.
    """

    part: int = 0
    of: int = 1
    words: bool = False

    def chosen(self, names: Iterable[str]) -> frozenset[str]:
        """Those of `names`, which may come in any order."""
        return frozenset(sorted(names)[self.part :: self.of]) if self.of else frozenset()


EVERY_WEIGHT = Sample()
"""Every weight."""

Samples = Callable[[PolicyVersion], Sample]
"""What to compare when a version is handed over."""


class WeightSource(Protocol):
    """A trainer, as a weight sync sees it."""

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Safetensors' name of the dtype, and the shape, of what `named_weights` hands out. Needs no lease."""
        ...

    def named_weights(self) -> "Iterator[tuple[str, Tensor]]":
        """Every weight under its Hugging Face name, tied tensors once, in the trainer's dtype, on its device.

        Each stays as it is for as long as anybody holds it, until the trainer's own state changes.
        """
        ...


class WeightReceiver(Tenant, Protocol):
    """An engine, as a weight sync sees it: under its lease for weights, in the order of the methods here."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of all its weights, or None when unknown: then it refuses to generate."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of its weights, `float32` or `bfloat16`: what `load_weights` casts to."""
        ...

    def begin_update(self) -> None:
        """Close generation and forget the version, until `publish`."""
        ...

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy into live storage, casting. Strict: an unexpected, repeated or misshapen weight is a WeightSyncError.

        It may be called several times in one update, with some of the weights each time; `publish` misses none.
        """
        ...

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Checksum of each weight of `sample` as it lies in the engine now, under its Hugging Face name."""
        ...

    def publish(self, version: PolicyVersion) -> None:
        """Drop every cache that depends on the old weights, take on `version`, open generation.

        Raises WeightSyncError when a weight has not come since `begin_update`, and when `version` is older than one
        published before.
        """
        ...


class WeightSync(Protocol):
    """All or nothing: on any failure the engine's version stays unknown, and a later whole sync repairs it."""

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Hand the trainer's weights to the engine, compare checksums, publish `version`.

        Takes the engine's lease for `Part.WEIGHTS`; the caller holds the trainer's. Raises WeightSyncError.
        """
        ...
