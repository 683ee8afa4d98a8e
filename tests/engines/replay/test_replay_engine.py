"""The engine of a replay (`tidemill.engines.replay.engine`)."""

import pytest

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.replay.engine import NoWeightSync, ReplayEngine
from tidemill.errors import EngineError


def test_a_replay_engine_takes_no_bytes_and_refuses_to_generate() -> None:
    engine = ReplayEngine()
    engine.wake_up(Part.ALL)
    assert (engine.resident(), engine.footprint(Part.ALL), engine.host_bytes()) == (Part.NONE, 0, 0)
    with pytest.raises(EngineError, match="rollout.replay"):
        engine.generate([Request(key="a", token_ids=(1,))], Sampling(max_new_tokens=1))
    with pytest.raises(EngineError, match="rollout.replay"):
        engine.load_pretrained(PolicyVersion(1, 0))
    assert engine.version is None


def test_no_weights_are_handed_to_it() -> None:
    engine = ReplayEngine()
    NoWeightSync().update_weights(engine, engine, PolicyVersion(1, 1))  # type: ignore[arg-type]
    assert engine.version is None
