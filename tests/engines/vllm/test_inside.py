"""What only a running vLLM shows: tidemill.engines.vllm.assembly, tidemill.engines.vllm.building,
tidemill.engines.vllm.loading, tidemill.engines.vllm.generation, tidemill.engines.vllm.weights, and
tidemill.compat.vllm_cpu_weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.vllm.test_engine import DEVICE, FIRST, PROMPTS, TOLERANCE, make
from transformers import AutoModelForCausalLM

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import Progress, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import ConfigError, EngineError, Interrupted, PluginError, ResidencyError, WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.engine_case import hand_over, open_awake, reference_logprobs, requests_of, weights_of
from tidemill.testing.tiny import make_tiny_model
from tidemill.weights.direct import DirectWeightSync

pytestmark = pytest.mark.vllm

LONG = [[(7 * row + 3 * column) % 90 + 4 for column in range(300 + row)] for row in range(3)]
STALE = 0.5  # nats, at the least, by which answers from other weights are off
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="of vLLM on a CPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def awake(folder: Path, **settings):
    engine = make(folder, **settings)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    return engine


def moved(model: Any) -> None:
    """Other weights, with which answers are clearly others."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def worst(engine, model: Any, prompts) -> float:
    """The largest difference between the engine's log-probs and the reference's."""
    requests = requests_of(prompts)
    answers = engine.generate(requests, Sampling(max_new_tokens=8))
    return max(
        abs(one - other)
        for request, answer in zip(requests, answers, strict=True)
        for one, other in zip(
            answer.logprobs, reference_logprobs(model, request.token_ids, answer.token_ids, 1.0), strict=True
        )
    )


def test_prompts_that_are_cached_are_computed_anew_with_new_weights(folder: Path, model: Any, monkeypatch) -> None:
    engine = awake(folder)
    pool = engine._inside.llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    for _ in range(2):
        assert worst(engine, model, LONG) < TOLERANCE
        assert len(pool.cached_block_hash_to_block) > 0, "prompts are longer than a block, or this shows nothing"
    moved(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._inside), "forget_cached", lambda inside: None)
        hand_over(engine, weights_of(model), PolicyVersion(1, 1))
        assert worst(engine, model, LONG) > STALE, "a stale cache would be seen"
    hand_over(engine, weights_of(model), PolicyVersion(1, 2))
    assert worst(engine, model, LONG) < TOLERANCE


def test_answers_after_a_sleep_come_from_the_new_weights_and_no_block_of_before(folder: Path, model: Any) -> None:
    engine = awake(folder)
    assert worst(engine, model, LONG) < TOLERANCE
    moved(model)
    engine.sleep()
    open_awake(engine)
    hand_over(engine, weights_of(model), PolicyVersion(1, 1))
    assert worst(engine, model, LONG) < TOLERANCE


class ModelSource:
    def __init__(self, model) -> None:
        self.model = model

    def weight_specs(self):
        return {name: ("F32", tuple(parameter.shape)) for name, parameter in self.model.named_parameters()}

    def named_weights(self):
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("qwen3", True, "float32"),
        ("qwen3", False, "bfloat16"),
        ("qwen2", True, "bfloat16"),
        ("qwen2", False, "float32"),
        ("llama", True, "float32"),
        ("llama", False, "bfloat16"),
        ("mistral", False, "float32"),
        ("gemma", True, "float32"),
        ("gemma2", True, "float32"),
        ("gemma3_text", True, "float32"),
    ],
)
def test_a_direct_sync_hands_over_every_family_tied_or_not(tmp_path: Path, family, tied, dtype) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=64, heads=2, kv_heads=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    moved(model)
    engine = make(folder, dtype=dtype)
    residency = LeaseManager(budget=engine.footprint(Part.ALL), emit=ignore, deadline=1.0)
    DirectWeightSync(residency=residency, emit=ignore).update_weights(ModelSource(model), engine, FIRST)
    with residency.awake(engine):
        assert worst(engine, model, PROMPTS) < (TOLERANCE if dtype == "float32" else 0.5)


def test_draws_are_those_of_the_transformers_engine(folder: Path) -> None:
    """Where log-probs agree to a few digits so do nearly all draws: one method, not two."""
    ours = awake(folder)
    other = TransformersEngine(model=folder, device=DEVICE, dtype="float32", max_batch=4, emit=ignore)
    open_awake(other)
    other.load_pretrained(FIRST)
    sampling = Sampling(max_new_tokens=12, seed=3)
    pairs = zip(
        ours.generate(requests_of(PROMPTS), sampling), other.generate(requests_of(PROMPTS), sampling), strict=True
    )
    assert sum(one.token_ids == two.token_ids for one, two in pairs) >= (8 if DEVICE == "cpu" else 5)


@pytest.mark.parametrize("options", [["max_num_batched_tokens=128"], ["enable_prefix_caching=false"]])
def test_draws_do_not_depend_on_how_prompts_are_cut_or_cached(folder: Path, options) -> None:
    sampling = Sampling(max_new_tokens=6, seed=3)
    plain = awake(folder).generate(requests_of(LONG), sampling)
    cut = awake(folder, options=options).generate(requests_of(LONG), sampling)
    assert [answer.token_ids for answer in cut] == [answer.token_ids for answer in plain]


def test_a_small_cache_makes_answers_wait_and_not_differ(folder: Path) -> None:
    sampling = Sampling(max_new_tokens=100, seed=3)
    requests = requests_of([[5 + row, 9, 20] for row in range(8)])
    small = awake(folder, max_batch=8, kv_tokens=256, options=["block_size=32"])
    few, size = small.generate(requests, sampling), small.footprint(Part.KV_CACHE)
    wide = awake(folder, max_batch=8, options=["block_size=32"])
    many = wide.generate(requests, sampling)
    assert size < wide.footprint(Part.KV_CACHE) / 20
    assert [answer.token_ids for answer in few] == [answer.token_ids for answer in many]


def test_the_cache_has_room_for_what_it_promises(folder: Path) -> None:
    engine = awake(folder, max_batch=4, kv_tokens=1000, options=["block_size=32"])
    token_bytes = 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, size, float32
    blocks = engine.footprint(Part.KV_CACHE) / (32 * token_bytes)
    assert blocks == -(-1000 // 32) + 4 + 1
    fixed = make(folder, kv_memory=1 << 24)
    assert (1 << 24) * 0.9 < fixed.footprint(Part.KV_CACHE) <= 1 << 24


@on_cpu
def test_sleep_frees_parameters_and_cache(folder: Path) -> None:
    engine = awake(folder)
    runner = engine._inside.llm.model_executor.driver_worker.model_runner
    tensors = [*runner.get_model().parameters(), *runner.kv_caches]

    def held() -> int:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    assert held() == engine.footprint(Part.ALL) > 1 << 20
    engine.sleep()
    assert held() == 0
    with pytest.raises(ResidencyError, match="asleep"):
        engine.gate.open(Part.ALL)
        engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=1))


def test_progress_counts_answers(folder: Path) -> None:
    seen: list[Progress] = []
    engine = awake(folder, emit=seen.append)
    engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=5))
    counts = [event.done for event in seen]
    assert counts == sorted(set(counts)) and counts[-1] == len(PROMPTS) == seen[-1].total


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_a_stop_while_it_generates_leaves_no_request_behind(folder: Path, model: Any, stop) -> None:
    wanted = True

    def interrupt(event) -> None:
        if wanted and isinstance(event, Progress):
            raise Interrupted("stopped")

    engine = awake(folder, emit=interrupt)
    requests = [Request(key=f"{row}", token_ids=(5 + row, 9)) for row in range(12)]
    with pytest.raises(Interrupted):
        engine.generate(requests, Sampling(max_new_tokens=5, stop=stop))
    core = engine._inside.llm.engine_core.engine_core
    assert not core.scheduler.has_requests()
    assert not engine._inside.llm.has_unfinished_requests()
    wanted = False
    assert worst(engine, model, PROMPTS) < TOLERANCE
    engine.sleep()


class _Stop:
    """Raises Interrupted at the n-th call of a function of vLLM's, before or behind what it does."""

    def __init__(self, owner: Any, name: str, *, at: int, behind: bool) -> None:
        self.owner, self.name, self.behind, self.left = owner, name, behind, at
        self.original = getattr(owner, name)

    def __enter__(self) -> None:
        setattr(self.owner, self.name, self)

    def __exit__(self, *exc: object) -> None:
        delattr(self.owner, self.name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.behind:
            raise Interrupted("stopped")
        result = self.original(*arguments, **named)
        if self.left == 0:
            raise Interrupted("stopped")
        return result


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("where", ["add", "schedule", "execute", "sample", "update"])
def test_a_stop_within_vllm_is_set_right_or_told(folder: Path, model: Any, where: str, behind: bool) -> None:
    engine = awake(folder)
    core = engine._inside.llm.engine_core.engine_core
    places = {
        "add": (core.scheduler, "add_request"),
        "schedule": (core.scheduler, "schedule"),
        "execute": (core.model_executor, "execute_model"),
        "sample": (core.model_executor, "sample_tokens"),
        "update": (core.scheduler, "update_from_output"),
    }
    for at in (1, 3):
        with _Stop(*places[where], at=at, behind=behind), pytest.raises(Interrupted):
            engine.generate(requests_of(LONG), Sampling(max_new_tokens=4))
        try:
            assert worst(engine, model, LONG) < TOLERANCE
        except EngineError as error:
            assert "start the same command again" in str(error)
            pytest.xfail(f"not set right: {error}")
    engine.sleep()
    assert engine.resident() == Part.NONE


def test_an_engine_that_gets_nowhere_ends_with_the_name_of_a_request(folder: Path, monkeypatch) -> None:
    engine = awake(folder, deadline=0.2)
    monkeypatch.setattr(engine._inside.llm, "step", lambda: [])
    with pytest.raises(EngineError, match=r"cannot answer request 0:0#0: vLLM computed no token in 0 s, with 10"):
        engine.generate(requests_of(PROMPTS), Sampling(max_new_tokens=2))


@on_cpu
def test_a_model_whose_weights_vllm_rewrites_is_refused(folder: Path, monkeypatch) -> None:
    from tidemill.compat import vllm_cpu_weights

    def rewrite(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.weight.data.mul_(2.0)
        vllm_cpu_weights._plain(layer, remove_weight)

    monkeypatch.setattr("tidemill.engines.vllm.building.keep_plain", lambda: None)
    monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", rewrite)
    with pytest.raises(EngineError, match=r"rewrites \d+ of its parameters for its kernels"):
        make(folder)


@on_cpu
def test_experts_are_refused_on_a_cpu_where_vllm_packs_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family="qwen3_moe", tied=False, hidden=64, heads=2, kv_heads=1)
    with pytest.raises(EngineError, match=r"rewrites 2 of its parameters for its kernels.*w13_weight"):
        make(folder)


def test_a_layer_that_packs_its_weight_is_found(folder: Path) -> None:
    from tidemill.compat.vllm_cpu_weights import check_plain

    layer = torch.nn.Linear(2, 2)
    layer.cpu_linear = lambda x, weight, bias: x
    with pytest.raises(PluginError, match="0 computes with a packed copy"):
        check_plain(torch.nn.Sequential(layer))


def test_an_option_that_is_none_is_refused_before_vllm_starts(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean block_size"):
        make(folder, options=["blok_size=32"])


def test_padding_of_the_vocabulary_is_zero_after_every_sleep(folder: Path) -> None:
    engine = awake(folder)
    for _ in range(2):
        table = engine._inside.llm.model_executor.driver_worker.model_runner.get_model().model.embed_tokens.weight
        vocabulary = engine._limits.vocabulary
        assert len(table) > vocabulary
        assert not table[vocabulary:].any()
        engine.sleep()
        engine.wake_up(Part.ALL)
        table[vocabulary:].fill_(1.0)
        engine.sleep()
        engine.wake_up(Part.ALL)


def test_weights_of_any_model_but_the_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = make(folder)
    open_awake(engine)
    other = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "other", hidden=64, heads=2, kv_heads=2))
    with pytest.raises(WeightSyncError, match=r"k_proj.weight into the engine: it came as \(64, 64\)"):
        hand_over(engine, weights_of(other), FIRST)
    assert engine.version is None


def test_another_engine_of_the_process_ends_the_earlier_one_which_refuses_and_a_closed_one_too(
    folder: Path, model: Any
) -> None:
    first = awake(folder)
    second = awake(folder)
    with pytest.raises(ResidencyError, match="another vLLM engine was made in this process"):
        first.generate(requests_of(PROMPTS), Sampling(max_new_tokens=1))
    with pytest.raises(ResidencyError, match="another vLLM engine"):
        first.wake_up(Part.ALL)
    del first
    assert worst(second, model, PROMPTS) < TOLERANCE
    second.sleep()
    second.close()
    second.close()
    assert worst(awake(folder), model, PROMPTS) < TOLERANCE
