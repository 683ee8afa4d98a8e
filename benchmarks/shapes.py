"""Shapes of models that several benchmarks use."""

__all__ = ["SHAPES", "parameter_shapes"]

# hidden, layers, heads, kv heads, head size, intermediate, vocabulary
SHAPES = {
    "tiny": (64, 2, 4, 4, 16, 192, 512),
    "qwen3-29m": (512, 8, 8, 4, 64, 1536, 8192),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151_936),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151_936),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151_936),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12_288, 151_936),
}


def parameter_shapes(name: str) -> list[tuple[int, ...]]:
    """Of a tied Qwen3 model."""
    hidden, layers, heads, kv_heads, size, intermediate, vocabulary = SHAPES[name]
    layer: list[tuple[int, ...]] = [
        (heads * size, hidden), (kv_heads * size, hidden), (kv_heads * size, hidden), (hidden, heads * size),
        (size,), (size,), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), *(layer * layers), (hidden,)]
