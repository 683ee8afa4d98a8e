"""Weights into a running vLLM by a plan, strict in names, and their checksums out of it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tidemill.contracts.weights import Sample
from tidemill.engines.common.arrivals import Arrivals
from tidemill.engines.common.stored import stored_weights
from tidemill.names.naming import Naming
from tidemill.weights.checksum import checksums
from tidemill.weights.copy_plan import CopyPlan
from tidemill.weights.grouped_copies import GroupedCopies

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PlannedWeights"]


class PlannedWeights:
    """Under the Hugging Face names of `naming`; `folder` holds the model's own ones."""

    def __init__(self, plan: CopyPlan, *, folder: Path, naming: Naming, dtype: torch.dtype) -> None:
        self._plan = plan
        self._folder = folder
        self._naming = naming
        self._dtype = dtype
        self._arrivals = Arrivals(plan.names)

    def pad(self) -> None:
        """Write what no weight brings, after memory has come back."""
        self._plan.fill()

    def begin(self) -> None:
        """Wait for every weight from now on, whatever came before."""
        self._arrivals.begin()

    def load(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights in, casting, many in one go on a GPU: each stays as it is until this returns.

        Raises WeightSyncError at the first name or shape that does not fit, or that has come since `begin`; what was
        copied by then stays.
        """
        with GroupedCopies() as copies:
            for name, tensor in tensors:
                self._arrivals.check(name)
                self._plan.copy(name, tensor, self._dtype, copies.add)
                self._arrivals.add(name)

    def missing(self) -> tuple[str, ...]:
        """Names of the weights that have not come since `begin`."""
        return self._arrivals.missing()

    def checksums(self, sample: Sample) -> Mapping[str, int]:
        """Of each weight of `sample` as it lies in vLLM's parameters, in the engine's dtype."""
        chosen = sample.chosen(self._plan.names)
        return checksums(((name, self._plan.read(name, self._dtype)) for name in chosen), words=sample.words)

    def stored(self) -> "Iterator[tuple[str, Tensor]]":
        """The folder's own weights. Raises DataError when there are none."""
        return stored_weights(self._folder, self._naming)
