"""SGLang itself on a GPU, by the public suites. `SGLANG` names its Python, in whose environment it is installed.

    SGLANG=/opt/sglang/bin/python python -m pytest -m gpu tests/engines/sglang

One server serves all models of one shape: they differ in weights, which every test hands over. `SGLANG_OPTIONS` are
words for its command line.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.remote.build import CONTROL, remote_engine
from tidemill.engines.remote.engine import ServerEngine
from tidemill.engines.remote.sglang_dialect import SglangDialect
from tidemill.engines.sglang.build import server_options, sglang_engine
from tidemill.engines.sglang.process import ServerProcess
from tidemill.errors import EngineError
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine, close_asleep, open_awake, requests_of
from tidemill.testing.suites.engine_weights import EngineWeightsSuite
from tidemill.testing.tiny import make_tiny_model

SGLANG = os.environ.get("SGLANG", "")
OPTIONS = os.environ.get("SGLANG_OPTIONS", "--attention-backend triton --disable-cuda-graph").split()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SGLANG, reason="SGLANG names no Python that has it")]

Url = Callable[[Path], str]


def started(folder: Path, log: Path) -> ServerProcess:
    told = {"model": folder, "dtype": "float32", "memory": 0.1, "max_batch": 8, "reproducible": True}
    return ServerProcess(
        lambda port: [SGLANG, "-m", "sglang.launch_server", *server_options(port=port, options=OPTIONS, **told)],
        name="SGLang",
        log=log,
        well=lambda client: SglangDialect().healthy(client, deadline=CONTROL),
        deadline=280.0,
        restarts=0,
        emit=ignore,
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Url]:
    servers: dict[tuple[Any, ...], ServerProcess] = {}
    with ExitStack() as stack:

        def find(folder: Path) -> str:
            config = json.loads((folder / "config.json").read_text())
            shape = tuple(config[name] for name in ("hidden_size", "vocab_size", "tie_word_embeddings"))
            if shape not in servers:
                place = tmp_path_factory.mktemp("server")
                shutil.copytree(folder, place / "model")
                servers[shape] = started(place / "model", place / "log")
                stack.callback(servers[shape].close)
            return servers[shape].url

        yield find


def leave_awake(engine: ServerEngine) -> None:
    """As the next engine expects to find the server."""
    absent = (Part.WEIGHTS | Part.KV_CACHE) & ~engine.resident()
    if absent:
        engine.wake_up(absent)
    engine.close()


class TestSglang(EngineAnswersSuite, EngineWeightsSuite):
    # Its kernels sum in another order than PyTorch's, and may round products to TF32.
    tolerance = 2e-2

    @pytest.fixture
    def make_engine(self, url: Url) -> Iterator[MakeEngine]:
        with ExitStack() as stack:

            def make(folder: Path) -> RolloutEngine:
                engine = remote_engine(
                    model=folder,
                    urls=(url(folder),),
                    server="sglang",
                    dtype="float32",
                    max_batch=8,
                    emit=ignore,
                    cache_memory=1 << 20,
                    device="cuda",
                )
                stack.callback(leave_awake, engine)
                return engine

            yield make

    def test_top_k_and_top_p_renormalise_over_what_they_keep(self, engine: RolloutEngine, model: Any) -> None:
        """Not on SGLang, which reports log-probs over all tokens: refused instead."""
        with pytest.raises(EngineError, match="over all tokens"):
            engine.generate(requests_of(self.prompts), Sampling(max_new_tokens=6, top_k=5))


def test_a_server_of_ours_frees_its_memory_in_sleep_and_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    import psutil
    import torch

    folder = make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)
    free = torch.cuda.mem_get_info()[0]
    command = (SGLANG, "-m", "sglang.launch_server")
    engine = sglang_engine(
        model=folder,
        dtype="float32",
        max_batch=8,
        emit=ignore,
        command=command,
        options=tuple(OPTIONS),
        memory=0.2,
        log=tmp_path / "log",
        start_deadline=280.0,
        device="cuda",
    )
    asleep = free - torch.cuda.mem_get_info()[0]
    open_awake(engine)
    awake = free - torch.cuda.mem_get_info()[0]
    assert awake - asleep > 0.9 * engine.footprint(Part.KV_CACHE)
    engine.load_pretrained(PolicyVersion(1, 0))
    asked = requests_of([[5, 6, 7], [8, 9]]), Sampling(max_new_tokens=8, temperature=0.0)
    expected = [answer.token_ids for answer in engine.generate(*asked)]
    guardian = psutil.Process(engine._replicas[0].process._guardian.pid)  # type: ignore[attr-defined]
    for process in guardian.children(recursive=True):
        process.kill()
    assert [answer.token_ids for answer in engine.generate(*asked)] == expected
    close_asleep(engine)
    engine.close()
