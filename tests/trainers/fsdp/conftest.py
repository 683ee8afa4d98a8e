"""Tiny models and trainers over them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers.fsdp.rank_service import Groups
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tidemill.contracts.events import ignore
from tidemill.contracts.workers import Place
from tidemill.testing.tiny import make_tiny_model
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer

MakeFsdpTrainer = Callable[..., FsdpTrainer]
RL = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    schedule="cosine",
    warm_up_steps=3,
    min_ratio=0.1,
    total_steps=10,
)
WARM_UP = PhaseSettings(
    lr=2e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=5,
)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a two-layer model, width 32, of a family and tying; made once a session."""
    made: dict[tuple[str, bool], Path] = {}

    def get(family: Any = "qwen3", tied: bool = True) -> Path:
        if (family, tied) not in made:
            folder = tmp_path_factory.mktemp("models") / f"{family}-{tied}"
            made[family, tied] = make_tiny_model(folder, family=family, tied=tied, hidden=32, heads=4, kv_heads=2)
        return made[family, tied]

    return get


@pytest.fixture
def make_fsdp_trainer(tiny_models: Callable[..., Path]) -> MakeFsdpTrainer:
    """A trainer on the tiny model; keywords override its constructor's."""

    def make(**changes: Any) -> FsdpTrainer:
        settings: dict[str, Any] = {
            "model": tiny_models(),
            "place": Place(),
            "compute_dtype": "float32",
            "tokens_per_micro_batch": 40,
            "minibatches": 1,
            "recompute": False,
            "max_grad_norm": 1.0,
            "phases": {"warm_up": WARM_UP, "rl": RL},
            "page_bytes": 1 << 16,
            "spare_bytes": 1 << 22,  # for tests that hold several versions
            "emit": ignore,
        }
        return FsdpTrainer(**(settings | changes))

    return make


@pytest.fixture(scope="session")
def uneven_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a model that no number of ranks divides: 33 words, feed-forward layers of 5 rows.

    `family` "qwen3_moe" has 3 experts of width 8 in its last layer, two for each token: products of groups take rows of
    whole 16 bytes only.
    """
    made: dict[tuple[bool, str], Path] = {}

    def get(tied: bool, family: str = "qwen3") -> Path:
        if (tied, family) not in made:
            sizes: dict[str, Any] = {
                "vocab_size": 33,
                "hidden_size": 24,
                "intermediate_size": 5,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "max_position_embeddings": 256,
                "tie_word_embeddings": tied,
            }
            if family == "qwen3_moe":
                sizes |= {
                    "moe_intermediate_size": 8,
                    "num_experts": 3,
                    "num_experts_per_tok": 2,
                    "mlp_only_layers": [0],
                }
            config = CONFIG_MAPPING[family](**sizes)
            torch.manual_seed(3)
            made[tied, family] = tmp_path_factory.mktemp("uneven")
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[tied, family])
        return made[tied, family]

    return get


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    """Ranks in processes of their own."""
    groups = Groups()
    yield groups
    groups.close()
