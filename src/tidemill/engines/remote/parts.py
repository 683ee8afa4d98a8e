"""What every engine of servers is made of, from a model folder and values of settings."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidemill.contracts.events import Emit
from tidemill.data.tokenizer_folder import load_tokenizer
from tidemill.engines.common.requests import Limits
from tidemill.engines.common.stopping import end_ids
from tidemill.engines.common.stored import stored_weights
from tidemill.engines.remote.dialect import Dialect
from tidemill.engines.remote.dispatch import Watch
from tidemill.engines.remote.engine import Probing, ServerEngine
from tidemill.engines.remote.probe import NoReference, Probe, Reference
from tidemill.engines.remote.replica import TEXT, Expected, Replica
from tidemill.engines.remote.staged_weights import StagedWeights, make_folder
from tidemill.errors import ConfigError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import model_skeleton
from tidemill.names.naming import Naming
from tidemill.weights.elements import torch_dtype

__all__ = ["ModelFacts", "join", "model_facts", "token_from"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What the model folder says. `naming` has the weights as servers and trainer call them."""

    folder: Path
    tokenizer: Any
    naming: Naming
    vocabulary: int
    context: int
    kind: str
    ends: tuple[int, ...]

    def bytes_in(self, dtype: str) -> int:
        """Of all weights, in an element type of that name."""
        return sum(math.prod(cut.shape) for cut in self.naming.names.values()) * torch_dtype(dtype).itemsize

    def expected(self, longest: int) -> Expected:
        """Of a server that is to take prompts and answers of `longest` tokens together."""
        return Expected(
            kind=self.kind,
            vocabulary=self.vocabulary,
            context=longest,
            text_ids=tuple(self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]),
            ends=self.ends,
        )


def model_facts(folder: Path) -> ModelFacts:
    """Read without a weight. Raises DataError."""
    tokenizer = load_tokenizer(folder)
    model = model_skeleton(folder, torch.float32)
    config = model.config
    return ModelFacts(
        folder=folder,
        tokenizer=tokenizer,
        naming=model_naming(model),
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        kind=config.model_type,
        ends=end_ids(folder, tokenizer, config.vocab_size),
    )


def token_from(variable: str) -> str:
    """The token in a variable of the environment; empty for no variable. Raises ConfigError when it is not set."""
    if not variable:
        return ""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"engine.token_env names {variable}, which is not set; export it, or leave the setting empty")
    if not token.isprintable() or not token.isascii():
        raise ConfigError(f"the token in {variable} holds what no HTTP header can; export it without line breaks")
    return token


def join(
    facts: ModelFacts,
    make: Callable[[Dialect, Expected], Sequence[Replica]],
    *,
    dialect: Dialect,
    dtype: str,
    max_batch: int,
    longest: int,
    device: str,
    weights_folder: Path | None,
    probe: int,
    probe_tolerance: float,
    watch: Watch,
    cache_bytes: int | None,
    emit: Emit,
) -> ServerEngine:
    """An engine of the replicas that `make` makes; what was made is ended when something later fails.

    `longest` is of a prompt and its answer, as far as the settings let them be; weights come from `device`.
    """
    context = min(facts.context, longest)
    wanted = torch_dtype(dtype)
    shapes = {name: cut.shape for name, cut in facts.naming.names.items()}
    aliases = {alias: kept for alias, kept in facts.naming.tied.items() if dialect.aliased and kept in shapes}
    staged = StagedWeights(
        make_folder(weights_folder),
        model=facts.folder,
        shapes=shapes,
        dtype=wanted,
        aliases=aliases,
        device=torch.device(device),
    )
    reference = Probe(Reference(facts.folder, wanted), vocabulary=facts.vocabulary, tolerance=probe_tolerance)
    try:
        replicas = make(dialect, facts.expected(context))
    except BaseException:
        staged.close()
        raise
    return ServerEngine(
        replicas,
        dialect=dialect,
        staged=staged,
        pretrained=partial(stored_weights, facts.folder, facts.naming),
        probing=Probing(reference if probe else NoReference(), every=probe),
        tokenizer=facts.tokenizer,
        limits=Limits(context=facts.context, vocabulary=facts.vocabulary, max_batch=max_batch, kv_tokens=facts.context),
        dtype=dtype,
        watch=watch,
        cache_bytes=cache_bytes,
        emit=emit,
    )
