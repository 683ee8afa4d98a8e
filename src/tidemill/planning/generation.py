"""What the transformers engine allocates besides weights and cache while it generates: an estimate from above."""

from dataclasses import dataclass

from tidemill.planning.decoder import Decoder

__all__ = ["Generation", "working_bytes"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """`rows` answers at once, to prompts of `prompt` tokens, `new` tokens each; `itemsize` is the engine's dtype's."""

    rows: int
    prompt: int
    new: int
    itemsize: int

    @property
    def positions(self) -> int:
        """Cached positions, the most that a batch may take."""
        return self.rows * (self.prompt + self.new)


def working_bytes(decoder: Decoder, generation: Generation, *, cache: int) -> int:
    """The fuller of two moments, all prompts in one layer or the draw from all words; and the cache of one layer.

    A cache grows by copying, a layer at a time.
    """
    size, tokens = generation.itemsize, generation.rows * generation.prompt
    heads = decoder.heads * decoder.head_dim
    mask = generation.rows * generation.prompt * generation.prompt * (1 + size)
    prompts = tokens * (size * (3 * decoder.active + 4 * heads) + 8 * decoder.hidden) + mask
    # Logits, scaled, log-probs, probabilities and, in float64, their sums.
    draw = generation.rows * decoder.words * (size + 4 + 4 + 4 + 4 + 8)
    return max(prompts, draw) + cache // decoder.layers
