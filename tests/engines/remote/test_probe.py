"""tidemill.engines.remote.probe: the reference is an engine of this process."""

from pathlib import Path

import pytest
import torch

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.remote.dialect import Dialect, ServerAnswer
from tidemill.engines.remote.probe import NoReference, Probe, Reference, check_log_probs
from tidemill.engines.remote.sglang_dialect import SglangDialect
from tidemill.engines.remote.vllm_dialect import VllmDialect
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import WeightSyncError
from tidemill.testing.suites.engine_case import hand_over, open_awake
from tidemill.testing.tiny import make_tiny_model


def engine_of(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=4, emit=ignore)
    open_awake(engine, Part.ALL)
    engine.load_pretrained(PolicyVersion(1, 0))
    return engine


def asking(engine: TransformersEngine):  # type: ignore[no-untyped-def]
    def ask(request: Request, sampling: Sampling) -> ServerAnswer:
        (answer,) = engine.generate([request], sampling)
        return ServerAnswer(
            token_ids=answer.token_ids, logprobs=answer.logprobs, stop_reason=answer.stop_reason, stamp=""
        )

    return ask


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_equal_weights_agree_and_a_later_version_in_the_same_tensors_too(
    tmp_path: Path, family: str, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=64, heads=2, kv_heads=1)
    engine = engine_of(folder)
    weights = {name: tensor.clone() for name, tensor in engine._weights.views().items()}
    probe = Probe(Reference(folder, torch.float32), vocabulary=100, tolerance=1e-4)
    assert probe.check(asking(engine), weights, named="x", version="1") < 1e-5
    for tensor in weights.values():
        tensor.mul_(1.3)
    with pytest.raises(WeightSyncError, match="x does not answer from version 2: .*24 probe tokens.*engine.probe_tol"):
        probe.check(asking(engine), weights, named="x", version="2")
    hand_over(engine, weights, PolicyVersion(1, 2))
    assert probe.check(asking(engine), weights, named="x", version="2") < 1e-5


def test_nothing_is_asked_where_servers_are_trusted() -> None:
    def never(request: Request, sampling: Sampling) -> ServerAnswer:
        raise AssertionError

    assert NoReference().check(never, {}, named="x", version="1") == 0.0


@pytest.mark.parametrize("dialect", [VllmDialect(), SglangDialect()])
def test_a_log_prob_that_is_known_beforehand_tells_what_is_reported(tmp_path: Path, dialect: Dialect) -> None:
    ask = asking(engine_of(make_tiny_model(tmp_path, hidden=64, heads=2, kv_heads=1)))
    check_log_probs(ask, dialect=dialect, vocabulary=100, named="x")

    def raw(request: Request, sampling: Sampling) -> ServerAnswer:
        return ask(request, Sampling(max_new_tokens=1))

    with pytest.raises(WeightSyncError, match=f"x does not report.*{dialect.advice}"):
        check_log_probs(raw, dialect=dialect, vocabulary=100 if dialect.name == "vLLM" else 96, named="x")
