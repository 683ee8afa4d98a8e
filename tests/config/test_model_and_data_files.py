"""tidemill.config.files: what settings name on the disk is there and is what it should be."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.tokenizer_files import TOKENIZER_KINDS

Problems = Callable[..., list[str]]


def as_pipe(path: Path) -> None:
    """Whoever opens it waits for ever."""
    path.unlink()
    os.mkfifo(path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda model: (model / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda model: (model / "config.json").write_text("{"), "its config.json cannot be read"),
    "config is a list": (lambda model: (model / "config.json").write_text("[]"), "is not a JSON object"),
    "binary config": (lambda model: (model / "config.json").write_bytes(b"\xff\xfe"), "its config.json cannot be read"),
    "config is a pipe": (lambda model: as_pipe(model / "config.json"), "its config.json is not a file"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
    "broken tokenizer": (
        lambda model: (model / "tokenizer_config.json").write_text("x"),
        "tokenizer_config.json cannot",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_folder_that_is_not_whole_is_refused(problems: Problems, folder: Path, case: str) -> None:
    spoil, reason = BROKEN[case]
    spoil(folder / "model")
    (found,) = problems()
    assert found.startswith("model = ") and "(run.toml)" in found and reason in found


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_tokenizer_may_be_of_any_kind_that_can_be_loaded(problems: Problems, folder: Path, kind: list[str]) -> None:
    model = folder / "model"
    (model / "tokenizer.json").unlink()
    for name in kind:
        (found,) = problems()
        assert "vocab.json with merges.txt, vocab.txt" in found
        (model / name).write_text("")
    assert problems() == []


def test_a_model_that_is_a_name_on_a_hub_is_refused_with_the_way_to_get_it(problems: Problems) -> None:
    (found,) = problems("model=someone/some-model")
    assert "there is no such folder; name a local folder" in found and "tidemill model import" in found
    (found,) = problems("model=prompts.jsonl")
    assert "is not a folder" in found


def test_a_chat_template_is_there_when_it_is_always_used(problems: Problems, folder: Path) -> None:
    (found,) = problems("data.chat=template")
    assert "has no chat template" in found
    assert problems("data.chat=auto") == []
    (folder / "model" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert problems("data.chat=template") == []
    (folder / "model" / "tokenizer_config.json").unlink()
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert problems("data.chat=template") == []


@pytest.mark.parametrize("path", ["data.prompts", "eval.data", "warm_up.data"])
def test_data_is_a_file(problems: Problems, path: str) -> None:
    (found,) = problems(f"{path}=gone.jsonl")
    assert found.startswith(path) and "there is no such file" in found
    (found,) = problems(f"{path}=model")
    assert "is a folder; name a file" in found


def test_data_of_a_run_is_not_wanted_where_nothing_is_trained(problems: Problems) -> None:
    words = ("eval.data=gone", "warm_up.data=gone", "rollout.replay=gone", "run.dir=prompts.jsonl")
    assert problems(*words, training=False) == []
    assert len(problems(*words)) == 4


def test_a_run_folder_that_cannot_be_written_is_seen_before_it_is_made(
    problems: Problems, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    (found,) = problems("run.dir=new/run")
    assert "is read-only" in found and str(folder) in found


def test_looking_makes_nothing(problems: Problems, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert problems() == []
    assert sorted(folder.rglob("*")) == before


def test_a_circle_of_links_is_a_problem_and_not_a_crash(problems: Problems, folder: Path) -> None:
    (folder / "circle").symlink_to(folder / "circle")
    for word in ("model=circle", "data.prompts=circle", "run.dir=circle/run", "rollout.replay=circle"):
        found = problems(word)
        assert len(found) <= 1 and all(line.startswith(word.partition("=")[0]) for line in found), word


def test_a_path_that_no_file_system_takes_is_a_problem(problems: Problems) -> None:
    (found,) = problems(f"run.dir={'x' * 300}")
    assert "names have up to 255 bytes" in found


def test_a_special_file_is_no_data(problems: Problems, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (found,) = problems("data.prompts=pipe")
    assert "there is no such file" in found


@pytest.mark.parametrize("use", [".score:f", "__main__:f", "..:f"])
def test_an_odd_module_name_is_a_problem_and_not_a_crash(problems: Problems, use: str) -> None:
    assert all(line.startswith("reward.use") for line in problems(f"reward.use={use}"))
