"""A causal language model of transformers, as the trainer computes with it.

Parameters are float32 masters; the forward pass runs in the compute dtype. `B` rows of `T` tokens, `M` of them
predicted from, `V` words.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tidemill.errors import DataError, TrainerError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import computed_buffers, model_skeleton
from tidemill.models.stored import Wanted, WeightReader, fill, open_weights
from tidemill.names.naming import Naming
from tidemill.trainers.common.logprobs import token_logprobs
from tidemill.trainers.common.padding import PaddedRows
from tidemill.trainers.fsdp.pieces import local, whole_and_offset

__all__ = ["ComputeDtype", "PolicyModel", "Predictor", "load_predictor"]

ComputeDtype = Literal["float32", "bfloat16"]
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")


class Predictor(nn.Module):
    """Logits at chosen places only. One module for the whole pass: hooks on it see all that is computed.

    `naming` is of the whole model, which may be cut afterwards.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.naming = model_naming(network)
        self._cap: float = network.config.to_dict().get("final_logit_softcapping") or math.inf

    def forward(self, input_ids: Int64[Tensor, "B T"], places: Int64[Tensor, " M"]) -> Float[Tensor, "M V"]:
        """`places` are of the flattened rectangle. Only these meet the word matrix: prompts cost no logits."""
        hidden = self.network.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        logits: Tensor = self.network.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, places))
        return logits if self._cap == math.inf else torch.tanh(logits / self._cap) * self._cap


class PolicyModel:
    """Log-probs of tokens by a predictor, under autocast to `autocast` unless that is float32.

    A pass over several ranks that failed half-way leaves FSDP2 in the middle of it for good: then every further one
    raises TrainerError.
    """

    def __init__(self, predictor: Predictor, *, device: torch.device, autocast: torch.dtype) -> None:
        self.predictor = predictor
        self.words: int = predictor.network.config.vocab_size
        self._device = device
        self._autocast = autocast
        self._broken = False

    def logprobs(self, rows: PaddedRows, places: Int64[Tensor, " M"], *, temperature: float) -> Float[Tensor, " M"]:
        """Log-prob of the targets at `places` of the flattened rectangle, in nats, float32, with gradient."""
        with (
            self._passing(),
            torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast != torch.float32),
        ):
            logits = self.predictor(rows.input_ids, places)
        return token_logprobs(logits, rows.target_ids.flatten().index_select(0, places), temperature=temperature)

    def backward(self, total: Float[Tensor, ""]) -> None:
        """Add the gradient of `total`, which was computed from log-probs, to those of the parameters."""
        with self._passing():
            total.backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        if self._broken:
            raise TrainerError(
                "cannot compute: an earlier pass over several ranks failed half-way, and cannot be taken up in this "
                "process; resume the run from its checkpoint"
            )
        try:
            yield
        except BaseException:
            self._broken = isinstance(self.predictor, FSDPModule)
            raise


def load_predictor(
    folder: Path,
    *,
    device: torch.device,
    recompute: bool,
    shard: Callable[[Predictor], None] = lambda _: None,
    read: Callable[[WeightReader], WeightReader] = lambda reader: reader,
) -> Predictor:
    """The model in `folder`, float32, in train mode without dropout; nothing is downloaded and no code of it is run.

    `shard` may cut the parameters while they have no memory yet; then only this rank's rows are read, through what
    `read` makes of the open files. `recompute` keeps only the inputs of each layer for the backward pass. Raises
    DataError when the folder holds no model of a known type, or not exactly its weights. Communicates nothing.
    """
    network = model_skeleton(folder, torch.float32)
    _check_type(folder, network.config.model_type)
    if recompute:
        _recompute_layers(network)
    predictor = Predictor(network)
    shard(predictor)
    with open_weights(folder) as reader:
        _materialise(predictor, device)
        opened = read(reader)
        fill(folder, opened, _wanted(network, predictor.naming, opened.shapes()))
    return predictor.train()


def _materialise(predictor: Predictor, device: torch.device) -> None:
    """Memory for every parameter, with anything in it, and the buffers as they should be."""
    network = predictor.network
    buffers = computed_buffers(network)
    predictor.to_empty(device=device)
    # Each place got a tensor of its own, tied ones too.
    network.tie_weights()
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])


def _wanted(network: nn.Module, naming: Naming, stored: Collection[str]) -> list[Wanted]:
    """This rank's rows of every tensor, as files have them; one that is joined in the files too is taken as it is."""
    also: dict[str, list[str]] = {}
    for name, kept in naming.tied.items():
        also.setdefault(kept, []).append(name)
    found = []
    for name, tensor in network.named_parameters():
        whole, offset = whole_and_offset(tensor)
        mine = local(tensor)
        if name in stored:
            found.append(Wanted(names=(name, *also.get(name, ())), whole=whole, start=offset[0], tensor=mine))
            continue
        for part in naming.overlaps(name, offset, tuple(mine.shape)):
            names = (part.cut.name, *also.get(name, ()))
            found.append(Wanted(names=names, whole=part.cut.shape, start=part.offset[0], tensor=part.view(mine)))
    return found


def _check_type(folder: Path, model_type: str) -> None:
    if model_type not in _MODEL_TYPES:
        raise DataError(
            f'cannot train the model in {folder}: its type is {model_type!r}, and trainer.use = "fsdp" knows '
            f"{', '.join(_MODEL_TYPES)}; choose a model of one of these"
        )


def _recompute_layers(network: Any) -> None:
    with warnings.catch_warnings():
        # From 5.24 on the method has another name; 5.17 knows this one only.
        warnings.simplefilter("ignore", FutureWarning)
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
