import pytest

from tidemill.engines.vllm.options import native_options
from tidemill.errors import ConfigError

KNOWN = ["block_size", "max_num_batched_tokens", "attention_backend", "enable_prefix_caching", "seed", "load_format"]


def test_options_are_read_as_toml_by_their_names() -> None:
    written = ["block_size=32", "attention-backend = 'TRITON_ATTN'", "enable_prefix_caching=false"]
    assert native_options(written, KNOWN) == {
        "block_size": 32,
        "attention_backend": "TRITON_ATTN",
        "enable_prefix_caching": False,
    }
    assert native_options([], KNOWN) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (["block_sise=32"], "no such option; did you mean block_size"),
        (["zzz=1"], "no such option; see vLLM's engine arguments"),
        (["block_size"], "write name=value"),
        (["=3"], "write name=value"),
        (["attention_backend=TRITON_ATTN"], "its right side is TOML"),
        (["block_size=1", "block-size=2"], "twice"),
        (["seed=1"], "run.seed decides it"),
        (["kv-cache-memory-bytes=1"], "engine.kv_memory decides it"),
        (["load_format='dummy'"], "weights come from the trainer"),
        (["tensor_parallel_size=2"], "an engine of more than one GPU is not supported yet"),
        (["quantization='fp8'"], "quantized weights is not supported yet|not supported yet"),
    ],
)
def test_what_is_none_of_the_users_options_is_refused_with_a_reason(written, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        native_options(written, KNOWN)


@pytest.mark.vllm
def test_every_option_that_is_refused_is_one_of_the_installed_vllm() -> None:
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    from tidemill.engines.vllm import options

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {*options._SETTING, *options._FIXED, *options._NOT_YET} - known <= {"enable_cumem_allocator"}
