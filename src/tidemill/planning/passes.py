"""What a pass of the trainer allocates besides its state: activations, logits, copies of weights, and when.

Counted from what autograd keeps of the decoder layers of `transformers` and of our own log-probs, tensor by tensor; the
numbers are bytes a token and a layer. What lives within one operation only is left out, save where it is large.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.planning.decoder import Decoder
from tidemill.planning.model_folder import Model
from tidemill.planning.state import RankState

__all__ = ["PassParts", "Work", "optimizer_parts", "pass_parts"]

PassParts = Mapping[str, int]
"""Bytes by part: `gradients`, `copies` of weights, `activations`, `logits`."""

_CHUNK_ELEMENTS = 1 << 26  # of log-probs at a time
_NORM_ELEMENTS = 1 << 24
_IDS = 64  # bytes a token of ids, masks and numbers of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Work:
    """The largest micro-batch: `tokens` with padding, of which `trained` meet the word matrix; `passes` an update.

    `itemsize` is that of the compute dtype; `shards` ranks hold a copy of the model, `ranks` take part.
    """

    tokens: int
    trained: int
    passes: int
    itemsize: int
    recompute: bool
    ranks: int
    shards: int


def pass_parts(model: Model, state: RankState, work: Work) -> PassParts:
    """Forward and backward over micro-batches, at their fullest moment."""
    return max(_moments(model, state, work), key=lambda parts: sum(parts.values()))


def optimizer_parts(state: RankState) -> PassParts:
    """The norm is taken in float64, of so many elements at a time."""
    return {"gradients": state.gradients + 8 * min(state.largest, _NORM_ELEMENTS)}


def _moments(model: Model, state: RankState, work: Work) -> list[PassParts]:
    sizes = _Sizes.of(model.decoder, work)
    copies = _over_ranks(model, work) if work.ranks > 1 else _alone(model, work)
    # In the first pass of an update gradients grow while activations go.
    before = state.gradients if work.passes > 1 else 0
    kept, logits, chunk = sizes.kept, sizes.logits, sizes.chunk
    one = sizes.layer + sizes.layer_backward
    last = kept + (one if work.recompute else sizes.layer_backward)
    return [
        # The forward pass ends; log-probs are computed, and passed back; then the words, the last layer and the first.
        _parts(before, copies.forward, kept, logits),
        _parts(before, copies.kept, kept, logits + 2 * chunk),
        _parts(before, copies.kept, kept, 2 * logits + (2 if work.itemsize < 4 else 1) * chunk),
        _parts(before + copies.words_made, copies.kept, kept, logits),
        _parts(before + copies.words_held, copies.backward, last, 0),
        _parts(state.gradients + copies.words_first, copies.first_layer, one, 0),
        _parts(state.gradients + copies.words_last, copies.end, 0, 0),
    ]


def _parts(gradients: int, copies: int, activations: int, logits: int) -> PassParts:
    return {"gradients": gradients, "copies": copies, "activations": activations, "logits": logits}


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of activations: all that is `kept` for the backward pass, all of one `layer`, and what comes and goes."""

    kept: int
    layer: int
    layer_backward: int
    logits: int
    chunk: int

    @classmethod
    def of(cls, decoder: Decoder, work: Work) -> "_Sizes":
        cut = work.ranks > 1
        layer = work.tokens * _layer_bytes(decoder, itemsize=work.itemsize, cut=cut)
        # Under autocast the residual stream stays float32; cut models compute all in one dtype.
        stream = work.itemsize if cut else 4
        row = work.tokens * decoder.hidden
        norm = row * (4 + stream) + work.trained * decoder.hidden * work.itemsize
        return cls(
            kept=decoder.layers * (row * stream if work.recompute else layer) + norm + _IDS * work.tokens,
            layer=layer,
            layer_backward=work.tokens * (2 * decoder.active * work.itemsize + 4 * decoder.hidden),
            logits=work.trained * decoder.words * work.itemsize,
            chunk=4 * min(max(_CHUNK_ELEMENTS, decoder.words), work.trained * decoder.words),
        )


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """Bytes of weights as a pass computes with them, at its moments; and of gradients that are not added up yet.

    `words_*` are of the word matrices: as the first is made, while layers are passed back, at the first layer, and at
    the end.
    """

    forward: int
    kept: int
    backward: int
    first_layer: int
    end: int
    words_made: int
    words_held: int
    words_first: int
    words_last: int


def _alone(model: Model, work: Work) -> _Copies:
    """Autocast keeps a cast copy of each weight until the forward pass ends, and autograd what it multiplied with."""
    words, tied, later = model.decoder.words * model.decoder.hidden, model.decoder.tied, work.passes > 1
    layers = model.layers()
    cast = work.itemsize if work.itemsize < 4 else 0
    everything, largest = cast * (sum(layers) + words), cast * max(layers)
    # Of a tied matrix there are two gradients, one from each of its uses, and without a cast their sum besides.
    of_tied = (1 if cast else 2) if tied else 0
    return _Copies(
        forward=everything,
        kept=cast * words if work.recompute else everything,
        backward=largest if work.recompute else everything,
        first_layer=largest,
        end=0,
        words_made=(4 + cast) * words,
        words_held=4 * words if tied or not later else 0,
        words_first=4 * words * (int(tied) - int(not later)),
        words_last=4 * words * (of_tied + int(later)),
    )


def _over_ranks(model: Model, work: Work) -> _Copies:
    """A layer, the next under way and the buffer that it comes in are whole; what lies in no layer is, all the time.

    On its way to the other ranks a gradient is whole, in the compute dtype and once more in float32.
    """
    words = model.decoder.words * model.decoder.hidden
    layers = model.layers()
    largest, rest = max(layers), model.parameters - sum(layers)
    forward = work.itemsize * (rest + 3 * largest)
    backward = forward + (work.itemsize + 4) * largest
    return _Copies(
        forward=forward,
        kept=forward,
        backward=backward,
        first_layer=backward,
        end=work.itemsize * rest,
        words_made=work.itemsize * words,
        words_held=work.itemsize * words,
        words_first=work.itemsize * words,
        words_last=(work.itemsize + 4) * rest + 4 * rest // work.shards,
    )


def _layer_bytes(decoder: Decoder, *, itemsize: int, cut: bool) -> int:
    """What autograd keeps of one decoder layer for each token."""
    hidden, own, shared = decoder.hidden, decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    if itemsize == 4:
        # Two norms: what comes in, scaled, and times the weight.
        norms = 2 * 3 * 4 * hidden
    elif cut:
        norms = 2 * (4 + 2 + 2) * hidden
    else:
        # Five linear layers cast what the norms hand them, each for itself.
        norms = 2 * (4 + 4) * hidden + 5 * itemsize * hidden
    attention = itemsize * (2 * own + 2 * shared) + 4 * decoder.heads
    if decoder.head_norms:
        attention += (8 if itemsize == 4 else 6) * (own + shared)
    return norms + attention + 4 * itemsize * decoder.active
