"""Planned bytes of a pass are those that PyTorch allocates, counted on a CPU (`tidemill.planning.passes`)."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tidemill.planning.decoder import buffer_shapes, decoder_of, parameter_shapes
from tidemill.planning.model_folder import Model
from tidemill.planning.passes import Work, optimizer_parts, pass_parts
from tidemill.planning.state import rank_state
from tidemill.trainers.common.gradients import norm_of
from tidemill.trainers.fsdp.model import PolicyModel, Predictor
from tidemill.units import MIB

CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
SHAPES: dict[str, tuple[dict[str, int], int, int]] = {
    "many words": ({"vocab_size": 8000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}, 4, 256),
    "deep": ({"vocab_size": 300, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 8}, 4, 256),
    "few tokens": ({"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}, 2, 64),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated at once, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = watched.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(count for _, count in changes))


def planned(config: Any, *, tokens: int, dtype: torch.dtype, recompute: bool, passes: int) -> int:
    text = config.to_dict()
    model = Model(
        folder=Path("none"),
        decoder=decoder_of(text),
        shapes=parameter_shapes(text),
        buffers=buffer_shapes(text),
        source="",
    )
    state = rank_state(model, shards=1, page_bytes=64 * MIB)
    work = Work(
        tokens=tokens,
        trained=tokens,
        passes=passes,
        itemsize=dtype.itemsize,
        recompute=recompute,
        ranks=1,
        shards=1,
    )
    return sum(pass_parts(model, state, work).values())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pass_takes_what_was_planned_within_a_tenth(
    shape: str, family: Any, dtype: torch.dtype, recompute: bool, passes: int
) -> None:
    sizes, rows, width = SHAPES[shape]
    config = family(**sizes, **HEADS, tie_word_embeddings=passes == 1, bos_token_id=1, eos_token_id=2)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    if recompute:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(Predictor(network), device=CPU, autocast=dtype)
    ids = torch.randint(0, config.vocab_size, (rows, width))
    batch: Any = SimpleNamespace(input_ids=ids, target_ids=ids)
    places = torch.arange(rows * width)

    def work() -> None:
        for _ in range(passes):
            policy.backward(policy.logprobs(batch, places, temperature=1.0).sum())

    expected = planned(config, tokens=rows * width, dtype=dtype, recompute=recompute, passes=passes)
    assert expected == pytest.approx(peak_bytes(work), rel=0.1)


def test_the_norm_of_gradients_takes_what_was_planned() -> None:
    gradients = [torch.randn(1000, 100), torch.randn(300, 100)]
    state: Any = SimpleNamespace(gradients=0, largest=100_000)
    assert peak_bytes(lambda: norm_of(gradients)) == pytest.approx(optimizer_parts(state)["gradients"], rel=0.01)
