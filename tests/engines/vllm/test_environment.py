import logging
import os
import random

import numpy as np
import pytest
import torch

from tidemill.contracts.events import Notice
from tidemill.engines.vllm.environment import import_vllm, left_alone
from tidemill.errors import PluginError


def test_random_generators_and_threads_are_as_before_behind_the_start() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with left_alone():
        random.seed(1), np.random.seed(1), torch.manual_seed(1), torch.rand(3)
        torch.set_num_threads = lambda count: None
        torch.set_float32_matmul_precision("medium")
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == "highest"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.fixture
def environment(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


def test_variables_stand_before_the_import_and_a_users_choice_stays(environment, monkeypatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr("importlib.import_module", lambda name: seen.update(os.environ))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    import_vllm(lambda event: None)
    assert seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert seen["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_errors_in_its_log_become_notices_and_nothing_is_printed(environment, monkeypatch, capfd) -> None:
    told: list[Notice] = []
    monkeypatch.setattr("importlib.import_module", lambda name: None)
    import_vllm(told.append)
    log = logging.getLogger("vllm.engine")
    log.info("starting"), log.warning("slow"), log.error("lost %d blocks", 3)
    assert [(event.text, event.level) for event in told] == [("vLLM: lost 3 blocks", "warning")]
    assert capfd.readouterr() == ("", "")


def test_a_vllm_that_does_not_fit_is_named_with_a_remedy(environment, monkeypatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(PluginError, match=r"cannot use engine.use = vllm.*torchvision::nms.*docs/engines.md"):
        import_vllm(lambda event: None)
