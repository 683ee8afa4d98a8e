import json
import random

import numpy
import pytest
import torch

from tidemill.checkpoint.rng import RandomState
from tidemill.contracts.checkpoint import Saved
from tidemill.errors import CheckpointError
from tidemill.testing.suites.stateful import StatefulCase, StatefulSuite


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(numpy.random.standard_normal()), float(torch.randn(1))


def test_draws_after_a_restore_are_those_after_the_save() -> None:
    state = RandomState()
    draw()  # leaves a half-used pair of normals behind
    extra = json.loads(json.dumps(dict(state.snapshot().extra)))
    wanted = [draw() for _ in range(3)]
    state.load(Saved(tensors={}, extra=extra))
    assert [draw() for _ in range(3)] == wanted


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_garbled_state_is_refused(part: str) -> None:
    state = RandomState()
    extra = json.loads(json.dumps(dict(state.snapshot().extra)))
    extra[part] = "AAAA"
    before = random.getstate()
    with pytest.raises(CheckpointError, match="random states"):
        state.load(Saved(tensors={}, extra=extra))
    assert random.getstate() == before


def test_states_of_devices_that_are_not_there_are_left() -> None:
    extra = dict(RandomState().snapshot().extra) | {"cuda": ["AAAA"]}
    if not torch.cuda.is_available():
        RandomState().load(Saved(tensors={}, extra=extra))


class TestStateful(StatefulSuite):
    """The suite that every saved part passes."""

    @pytest.fixture
    def case(self) -> StatefulCase:
        """One draw of each generator is the change."""

        def make() -> RandomState:
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            return RandomState()

        def change(part: object) -> None:
            draw()

        return StatefulCase(make, change)
