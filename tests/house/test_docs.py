"""What the documentation tells people to type: every command in a `console` block is real."""

import re
import shlex
from pathlib import Path

import pytest

from tidemill.cli import arguments
from tidemill.cli.main import parsed
from tidemill.config.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, command.strip()) for line in lines for command in line.split("&&") if command.strip()]
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_in_the_docs_is_one_that_works(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command)
    if program in {"git", "cd", "source"}:
        return
    if program == "make":
        assert {word for word in words if "=" not in word} <= TARGETS
        return
    if program == "python":
        assert (ROOT / words[0]).exists() or words[0] == "-m", command
        return
    assert program == "tidemill", f"{page}: who is {program}?"
    if words in (["--help"], ["--version"]):
        return
    told = parsed(words)
    if told.verb in {"run", "check", "plan", "rollout"}:
        load(told.files, told.words, check_files=False, training=told.verb != "rollout")


def links(page: Path) -> set[Path]:
    """The files of this repository that a page links to, whether they are there or not."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        waiting += [target for target in links(page) - reached if target.suffix == ".md" and target.exists()]
    assert set(PAGES) <= reached, sorted(page.name for page in set(PAGES) - reached)


def test_pages_link_to_files_that_are_there() -> None:
    for page in PAGES:
        for target in links(page):
            assert target.exists(), f"{page.name} links to {target}"


def test_every_verb_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for verb in ("run", "check", "plan", "rollout", "report", "ckpt", "model"):
        assert f"tidemill {verb}" in readme
    assert arguments.parser().prog == "tidemill"
