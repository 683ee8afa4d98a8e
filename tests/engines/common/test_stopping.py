import json
from pathlib import Path

import pytest
import torch

from tidemill.engines.common.stopping import NEVER, NoStopStrings, StopStrings, end_ids
from tidemill.errors import DataError
from tidemill.testing.tiny import make_tiny_tokenizer

DATA = Path(__file__).parents[2] / "data"


def watched(text: str, stop: tuple[str, ...], alphabet="bytes") -> int:
    """Length at which a watcher ends the one answer `text`, token by token."""
    tokenizer = make_tiny_tokenizer(alphabet)
    watcher = StopStrings(stop=stop, tokenizer=tokenizer, rows=1)
    for length, token in enumerate(tokenizer(text)["input_ids"], start=1):
        alive = torch.ones(1, dtype=torch.bool)
        watcher.watch(torch.tensor([0]), torch.tensor([token]), alive, length)
        if not alive[0]:
            break
    return int(watcher.lengths[0])


@pytest.mark.parametrize("stop", ["b", "ab", " c", "é", "日本", "\n\n", "a" * 30, "b c"])
@pytest.mark.parametrize("text", ["xab cé日本\n\n", "a" * 40, "éé日本 b c", "no such thing"])
def test_an_answer_ends_where_decoding_everything_at_each_token_would_end_it(text: str, stop: str) -> None:
    tokenizer = make_tiny_tokenizer("bytes")
    ids = tokenizer(text)["input_ids"]
    ends = [length for length in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:length])]
    assert watched(text, (stop,)) == (ends[0] if ends else NEVER)


def test_the_first_of_several_stop_strings_ends_it() -> None:
    assert watched("one two three", ("three", "two")) == len("one two")


def test_a_stop_string_spans_special_tokens_that_show_no_text() -> None:
    tokenizer = make_tiny_tokenizer()
    a, b = tokenizer("ab")["input_ids"]
    watcher = StopStrings(stop=("ab",), tokenizer=tokenizer, rows=2)
    index, lengths = torch.tensor([1]), []
    for length, token in enumerate([a, *[1] * 50, b], start=1):
        alive = torch.ones(1, dtype=torch.bool)
        watcher.watch(index, torch.tensor([token]), alive, length)
        lengths.append(bool(alive[0]))
    assert lengths == [True] * 51 + [False]
    assert watcher.lengths.tolist() == [NEVER, 52]


def test_rows_that_have_ended_are_not_watched() -> None:
    tokenizer = make_tiny_tokenizer()
    (a,) = tokenizer("a")["input_ids"]
    watcher = StopStrings(stop=("a",), tokenizer=tokenizer, rows=2)
    alive = torch.tensor([False, True])
    watcher.watch(torch.tensor([0, 1]), torch.tensor([a, a]), alive, 1)
    assert watcher.lengths.tolist() == [NEVER, 1]
    assert alive.tolist() == [False, False]


def test_without_stop_strings_nothing_is_watched() -> None:
    watcher = NoStopStrings(rows=3)
    alive = torch.ones(3, dtype=torch.bool)
    watcher.watch(torch.arange(3), torch.arange(3), alive, 1)
    assert alive.all()
    assert (watcher.lengths == NEVER).all()


def test_the_end_ids_of_all_three_places_are_known(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    assert end_ids(tmp_path, tokenizer, 100) == (2,)
    (tmp_path / "generation_config.json").write_bytes((DATA / "generation_config_two_eos.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_ids(tmp_path, tokenizer, 100) == (2, 7, 9)


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": 500}', '{"eos_token_id": "</s>"}', '{"eos_token_id": [2, -1]}', "{"]
)
def test_an_end_id_that_is_none_of_the_model_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match="cannot"):
        end_ids(tmp_path, make_tiny_tokenizer(), 100)
