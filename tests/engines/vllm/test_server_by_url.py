"""vLLM's own server behind its address, by the public suites: what tests.engines.stub_server stands in for."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import ignore
from tidemill.engines.remote.build import remote_engine
from tidemill.engines.remote.vllm_dialect import VllmDialect
from tidemill.engines.sglang.process import ServerProcess
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine
from tidemill.testing.suites.engine_weights import EngineWeightsSuite

pytestmark = pytest.mark.vllm

Url = Callable[[Path], str]


def started(folder: Path, log: Path) -> ServerProcess:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"]
    words += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    words += ["--logprobs-mode", "processed_logprobs"]
    if torch.cuda.is_available():
        words += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.1"]
    return ServerProcess(
        lambda port: ["env", "VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1", *words, "--port", str(port)],
        name="vLLM",
        log=log,
        well=lambda client: VllmDialect().healthy(client, deadline=5.0),
        deadline=240.0,
        restarts=0,
        emit=ignore,
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Url]:
    """One server for all models of one shape: they differ in weights, which every test hands over."""
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


class TestAVllmServer(EngineAnswersSuite, EngineWeightsSuite):
    # vLLM's attention sums in another order than PyTorch's, in blocks; a GPU may round products to TF32.
    tolerance = 2e-2 if torch.cuda.is_available() else 1e-3

    @pytest.fixture
    def make_engine(self, url: Url) -> Iterator[MakeEngine]:
        with ExitStack() as stack:

            def make(folder: Path) -> RolloutEngine:
                engine = remote_engine(
                    model=folder,
                    urls=(url(folder),),
                    dtype="float32",
                    max_batch=8,
                    emit=ignore,
                    cache_memory=1 << 20,
                    health_every=0.5,
                    device="cuda" if torch.cuda.is_available() else "cpu",
                )
                stack.callback(engine.close)
                return engine

            yield make
