from pathlib import Path

import pytest

from tidemill.contracts.events import ignore
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine
from tidemill.testing.suites.engine_weights import EngineWeightsSuite


def make(folder: Path, **settings) -> TransformersEngine:
    return TransformersEngine(
        **{"model": folder, "device": "cpu", "dtype": "float32", "max_batch": 4, "emit": ignore} | settings
    )


class TestTransformersEngine(EngineAnswersSuite, EngineWeightsSuite):
    tolerance = 3e-5

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return make
