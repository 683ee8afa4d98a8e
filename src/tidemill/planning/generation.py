"""What an engine allocates besides weights while it generates: its cache, and an estimate of the rest from above.

An engine of transformers grows the cache of a batch; vLLM keeps one of pages, which is there in full from the start.
"""

from dataclasses import dataclass

from tidemill.planning.decoder import Decoder

__all__ = ["Generation", "working_bytes"]


_PAGE = 16  # positions, vLLM's own choice for the kernels that it takes on a GPU
_TOGETHER = 16_384  # tokens that vLLM computes at once at most, unless an option says otherwise


@dataclass(frozen=True, kw_only=True)
class Generation:
    """`rows` answers at once, to prompts of `prompt` tokens, `new` tokens each; `itemsize` is the engine's dtype's.

    `paged`: by vLLM, whose cache has `cache_bytes`, or room for these answers where that is 0.
    """

    rows: int
    prompt: int
    new: int
    itemsize: int
    paged: bool = False
    cache_bytes: int = 0

    @property
    def positions(self) -> int:
        """Cached positions, the most that a batch may take; of pages one more for each answer, and one."""
        positions = self.rows * (self.prompt + self.new)
        return (-(-positions // _PAGE) + self.rows + 1) * _PAGE if self.paged else positions


def working_bytes(decoder: Decoder, generation: Generation, *, cache: int) -> int:
    """The fuller of two moments, all prompts in one layer or the draw from all words; and the cache of one layer.

    A cache grows by copying, a layer at a time. Pages do not grow, and their kernels need no mask.
    """
    size, tokens = generation.itemsize, generation.rows * generation.prompt
    heads = decoder.heads * decoder.head_dim
    mask = generation.rows * generation.prompt * generation.prompt * (1 + size)
    if generation.paged:
        tokens, mask, cache = min(tokens, _TOGETHER), 0, 0
    prompts = tokens * (size * (3 * decoder.active + 4 * heads) + 8 * decoder.hidden) + mask
    # Logits, scaled, log-probs, probabilities and, in float64, their sums.
    draw = generation.rows * decoder.words * (size + 4 + 4 + 4 + 4 + 8)
    return max(prompts, draw) + cache // decoder.layers
