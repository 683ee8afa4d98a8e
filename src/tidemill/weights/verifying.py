"""What a sync of weights compares, from one hand-over to the next, and what it tells of it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from tidemill.contracts.events import Emit, PhaseDone, WeightsCompared
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, Samples

__all__ = ["Verifier"]


class Verifier:
    """Of one engine. The first hand-over and the one after a failure are compared whole, if anything is compared.

    `words` says that one of the two sides may lie on an accelerator.
    """

    def __init__(self, *, samples: Samples, words: bool, emit: Emit) -> None:
        self._samples = samples
        self._words = words
        self._emit = emit
        self._proven = False

    def begin(self, version: PolicyVersion) -> Sample:
        """What to compare in the hand-over that begins."""
        sample = self._samples(version)
        chosen = sample if self._proven or not sample.of else EVERY_WEIGHT
        self._proven = False
        return replace(chosen, words=self._words)

    @contextlib.contextmanager
    def timed(self, owner: str, before: float = 0.0) -> Iterator[None]:
        """The block, and `before` seconds that were spent on it already, are the phase `verify`."""
        start, began = time.time() - before, time.perf_counter() - before
        try:
            yield
        finally:
            self._emit(PhaseDone(name="verify", start=start, seconds=time.perf_counter() - began, owner=owner))

    def passed(self, owner: str, *, compared: int, total: int) -> None:
        """The hand-over is done: `owner` has the version."""
        self._proven = True
        self._emit(WeightsCompared(owner=owner, compared=compared, total=total))
