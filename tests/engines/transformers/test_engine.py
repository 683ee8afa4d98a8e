import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Progress, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency, Tenant
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import DataError, EngineError, Interrupted, ResidencyError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine, open_awake, requests_of
from tidemill.testing.suites.engine_weights import EngineWeightsSuite
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.tiny import make_tiny_model
from tidemill.weights.direct import DirectWeightSync

FIRST = PolicyVersion(1, 0)
PROMPTS = [[5 + row, 9, 20] for row in range(10)]


def make(folder: Path, **settings) -> TransformersEngine:
    standard = {"model": folder, "device": "cpu", "dtype": "float32", "max_batch": 4, "emit": ignore}
    return TransformersEngine(**{**standard, **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1)


class TestTransformersEngine(EngineAnswersSuite, EngineWeightsSuite):
    tolerance = 3e-5

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return make


class TestTransformersEngineAsTenant(TenantSuite):
    @pytest.fixture
    def tenant(self, folder: Path) -> Tenant:
        return make(folder)

    def use(self, tenant: TransformersEngine, residency: Residency) -> None:
        tenant.load_pretrained(FIRST)
        assert len(tenant.generate(requests_of(PROMPTS), Sampling(max_new_tokens=3))) == len(PROMPTS)


class ModelSource:
    """A trainer's weights, as a sync sees them."""

    def __init__(self, model) -> None:
        self.model = model

    def weight_specs(self):
        return {name: ("F32", tuple(weight.shape)) for name, weight in self.named_weights()}

    def named_weights(self):
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_direct_sync_hands_over_every_family_tied_or_not(tmp_path: Path, family, tied, dtype) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=32, heads=2, kv_heads=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = make(folder, dtype=dtype)
    residency = LeaseManager(budget=engine.footprint(Part.ALL), emit=ignore, deadline=1.0)
    DirectWeightSync(residency=residency, emit=ignore).update_weights(ModelSource(model), engine, FIRST)
    with residency.awake(engine):
        synced = engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=5))
        engine.load_pretrained(FIRST)
        assert engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=5)) == synced


def test_a_tied_weight_stored_under_both_names_is_loaded_once(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    engine = make(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    open_awake(engine)
    engine.load_pretrained(FIRST)
    assert engine.version == FIRST
    assert "lm_head.weight" not in engine.weight_checksums()


def test_batches_keep_to_the_cache_that_the_footprint_promises(folder: Path) -> None:
    seen: list[Progress] = []
    engine = make(folder, max_batch=8, kv_tokens=20, emit=seen.append)
    assert engine.footprint(Part.KV_CACHE) == 20 * 2 * 2 * 1 * 16 * 4
    open_awake(engine)
    engine.load_pretrained(FIRST)
    few = engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=6))
    assert [event.done for event in seen] == [2, 4, 6, 8, 10]
    with pytest.raises(EngineError, match="the cache"):
        engine.generate(requests_of([[5] * 15]), Sampling(max_new_tokens=6))
    wide = make(folder, max_batch=64)
    assert wide.footprint(Part.KV_CACHE) == 64 * 2048 * 2 * 2 * 1 * 16 * 4
    open_awake(wide)
    wide.load_pretrained(FIRST)
    many = wide.generate(requests_of(PROMPTS), Sampling(max_new_tokens=6))
    assert [answer.token_ids for answer in few] == [answer.token_ids for answer in many]


def test_sleep_frees_the_memory_that_the_footprint_names(tmp_path: Path) -> None:
    engine = make(make_tiny_model(tmp_path, hidden=512, intermediate=8192, heads=4, kv_heads=4))

    def held() -> int:
        # Storages, not what the process holds: the C library may keep a block that it has given out before.
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in engine._weights.views().values()}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    open_awake(engine)
    engine.load_pretrained(FIRST)
    assert held() == engine.footprint(Part.WEIGHTS) > 90e6
    engine.sleep()
    assert held() == 0


def test_a_sleep_that_would_take_memory_that_is_lent_is_refused_and_the_engine_is_as_before(folder: Path) -> None:
    engine = make(folder)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    lent = next(iter(engine._weights.views().values())).numpy()
    with pytest.raises(ResidencyError, match=r"cannot release the engine's weights: a numpy array .*clone\(\)\.numpy"):
        engine.sleep()
    assert lent.size
    assert engine.resident() == Part.WEIGHTS | Part.KV_CACHE
    assert engine.version == FIRST
    assert len(engine.generate(requests_of(PROMPTS[:1]), Sampling(max_new_tokens=1))) == 1


def test_requests_that_arrive_while_another_thread_generates_are_refused_and_so_is_sleep(folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(event) -> None:
        inside.set()
        assert go_on.wait(timeout=10)

    engine = make(folder, emit=hold)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(engine.generate(requests_of(PROMPTS[:3]), Sampling(max_new_tokens=2)))
    )
    thread.start()
    assert inside.wait(timeout=10)
    with pytest.raises(ResidencyError, match="is generating"):
        engine.sleep()
    with pytest.raises(EngineError, match="another thread"):
        engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=2))
    go_on.set()
    thread.join(timeout=10)
    assert len(answers) == 3
    engine.sleep()
    with pytest.raises(ResidencyError, match="asleep"):
        engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=2))


def test_a_stop_while_it_generates_leaves_it_free_to_sleep(folder: Path) -> None:
    def stop(event) -> None:
        raise Interrupted("stopped")

    engine = make(folder, emit=stop)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    with pytest.raises(Interrupted):
        engine.generate(requests_of(PROMPTS[:3]), Sampling(max_new_tokens=2))
    engine.sleep()


def test_a_stop_at_any_call_of_generate_leaves_it_free_to_sleep(folder: Path) -> None:
    """A signal is delivered where Python calls something: here at the n-th call that the engine's file makes."""
    engine = make(folder)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    left = whole = 0

    def trace(frame, event: str, argument) -> None:
        nonlocal left
        if event in ("call", "c_call", "c_return") and frame.f_code.co_filename.endswith("transformers/engine.py"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Interrupted("stopped")

    while left <= 0:  # until a generation is over before its turn comes
        whole += 1
        left = whole
        try:
            sys.setprofile(trace)
            engine.generate(requests_of(PROMPTS[:1]), Sampling(max_new_tokens=1))
        except Interrupted:
            pass
        finally:
            sys.setprofile(None)
        assert not engine._users, f"taken for good by a stop at call {whole}"
    assert whole > 20

    engine.sleep()


def test_text_shows_no_special_token_and_not_the_one_that_ended_it(folder: Path) -> None:
    engine = make(folder)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    answers = engine.generate(requests_of([[row + 4, 5] for row in range(60)]), Sampling(max_new_tokens=40))
    assert any(answer.token_ids[-1] == 2 for answer in answers)
    assert any(1 in answer.token_ids for answer in answers)
    assert not any("<" in answer.text and "os>" in answer.text for answer in answers)


def test_a_folder_without_safetensors_cannot_be_loaded(folder: Path) -> None:
    engine = make(folder)
    (folder / "model.safetensors").unlink()
    open_awake(engine)
    with pytest.raises(DataError, match="no safetensors file"):
        engine.load_pretrained(FIRST)
    assert engine.version is None
