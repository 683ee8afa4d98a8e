"""The self-check of a start (`tidemill.rollout.agreement`) on a real engine and trainer, each fault in turn.

It must let a right pair pass, at any temperature, leave every bit of trainer and random state as it was, and refuse an
engine that serves other weights than it says or reports other log-probs than it sampled from.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.test_engine_and_trainer_agree import Pair, grpo, sharpened
from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Event, Notice
from tidemill.contracts.sample import Group
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import EngineError
from tidemill.rollout.agreement import EngineAgreement
from tidemill.testing.tiny import make_tiny_model

LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("check") / "model", hidden=32, heads=2, kv_heads=1, tied=False)
    return sharpened(made)


def trained(pair: Pair) -> None:
    """The trainer's weights move away from those of the model folder, as some steps of learning would move them."""
    make = torch.Generator().manual_seed(1)
    with pair.residency.awake(pair.trainer), torch.no_grad():
        for _, tensor in pair.trainer.named_weights():
            tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=make))


def sampled(pair: Pair, temperature: float, step: int = 4) -> list[Group]:
    return pair.groups(step, Sampling(max_new_tokens=12, temperature=temperature, seed=3))


def checked(pair: Pair, groups: list[Group], *, temperature: float, step: int = 4) -> list[Event]:
    events: list[Event] = []
    check = EngineAgreement(limit=LIMIT, decode=str, emit=events.append)
    with pair.residency.awake(pair.trainer):
        check.check(pair.trainer, groups, grpo(temperature).batch(groups), PolicyVersion(1, step))
    return events


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_a_right_pair_passes_and_no_bit_of_it_changes(folder: Path, temperature: float) -> None:
    pair = Pair(folder)
    trained(pair)
    pair.hand_over(4)
    groups = sampled(pair, temperature)

    def state() -> list[bytes]:
        with pair.residency.awake(pair.trainer):
            weights = [tensor.detach().numpy().tobytes() for _, tensor in pair.trainer.named_weights()]
        draws = (torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate()))
        return [*weights, *(str(draw).encode() for draw in draws)]

    before = state()
    notices = [event for event in checked(pair, groups, temperature=temperature) if isinstance(event, Notice)]
    assert state() == before
    assert len(notices) == 1 and "agree" in notices[0].text
    assert notices[0].details["mismatch/ratio"] == pytest.approx(1.0, abs=1e-4)


def base_weights_after_wake(pair: Pair) -> None:
    """An engine that loads its model folder when it wakes, and says that it has the version of before."""
    with pair.residency.awake(pair.engine):
        pair.engine.load_pretrained(PolicyVersion(1, 4))


def a_swapped_tensor(pair: Pair) -> None:
    """Two weights of one shape change places on the way, and nobody compares checksums."""
    with pair.residency.awake(pair.trainer), pair.residency.awake(pair.engine):
        weights = {name: tensor.detach().clone() for name, tensor in pair.trainer.named_weights()}
        one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
        weights[one], weights[other] = weights[other], weights[one]
        pair.engine.begin_update()
        pair.engine.load_weights(weights.items())
        pair.engine.publish(PolicyVersion(1, 4))


@pytest.mark.parametrize("fault", [base_weights_after_wake, a_swapped_tensor])
def test_an_engine_with_other_weights_than_it_says_is_refused(folder: Path, fault: Callable[[Pair], None]) -> None:
    pair = Pair(folder)
    trained(pair)
    pair.hand_over(4)
    fault(pair)
    with pytest.raises(EngineError, match="see that the engine serves the weights that were handed to it"):
        checked(pair, sampled(pair, 1.0), temperature=1.0)


def test_an_engine_of_an_older_version_is_refused(folder: Path) -> None:
    pair = Pair(folder)
    pair.hand_over(3)
    with pytest.raises(EngineError, match=r"version 3 .* version 4 "):
        checked(pair, sampled(pair, 1.0, step=3), temperature=1.0)


@pytest.mark.parametrize(("temperature", "claimed"), [(0.6, 1.0), (1.0, 1.3)])
def test_log_probs_at_another_temperature_are_refused(folder: Path, temperature: float, claimed: float) -> None:
    pair = Pair(folder)
    pair.hand_over(4)
    said = "agree at temperature 1" if temperature == 1.0 else "see that the engine"
    with pytest.raises(EngineError, match=said):
        checked(pair, sampled(pair, temperature), temperature=claimed)
