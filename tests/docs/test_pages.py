"""README and docs/: commands parse, links and paths lead somewhere, recipe keys exist, Python compiles."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import REPOSITORY, check_command, commands_of
from toolkit.recipe import Recipe

DOCS = REPOSITORY / "docs"
PAGES = sorted([REPOSITORY / "README.md", *DOCS.glob("*.md")])
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]
FOLDERS = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"runs", "build", "site"}
SECTIONS = {key.name for key in dataclasses.fields(Recipe)} - {"name", "seed", "run_dir"}
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)

pages = pytest.mark.parametrize("path", PAGES, ids=NAMES)


def blocks(path: Path, *languages: str) -> list[str]:
    """The code blocks of a page that are marked as one of these languages."""
    found = BLOCK.findall(path.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def prose(path: Path) -> str:
    """A page without its code blocks and comments."""
    return COMMENT.sub("", BLOCK.sub("", path.read_text(encoding="utf-8")))


def inline_code(path: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(path))


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_begins_with_what_the_reader_can_do_after_it(path: Path) -> None:
    """A reader decides by this line whether the page is the one that he needs."""
    title, after = (line for line in path.read_text(encoding="utf-8").splitlines()[:3] if line)
    assert title.startswith("# ") and after.startswith("After this page you can ")


@pytest.mark.parametrize(
    "line",
    [
        "toolkit rnu recipes/smollm2-135m.yaml",
        "tolkit serve --draft D",
        "python -m toolkit.absent",
        "toolkit run recipes/absent.yaml",
        "cd x && toolkit run recipes/smollm2-135m.yaml train.max_step=3",
        "toolkit serve --draft D --shapes 4,1,5 | tee log",
        "X=1 accelerate launch toolkit/train/absent.py",
        "accelerate launch toolkit/train/eagle3.py train.max_step=3",
        "sbatch recipes/slurm/train.sbatch train.max_step=3",
        "python benchmarks/rollouts.py --batches 16",
        "pytest --markers-of peers",
        "pytest tests/absent",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    """Otherwise the next test would check nothing."""
    (*_, command) = (one for one in commands_of([line]) if one[0] != "tee")
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_command(command)


@pages
def test_commands_parse(path: Path) -> None:
    """A renamed flag or key, or a script that moved, makes the first thing that a reader types fail."""
    for command in commands_of(blocks(path, "bash", "sh", "console")):
        check_command(command)


@pages
def test_python_compiles(path: Path) -> None:
    """An example with a syntax error cannot have been run."""
    for text in blocks(path, "python"):
        compile(text, path.name, "exec")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the site and as GitHub make them where the two agree."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", one) for one in words} & {re.sub(r"\s", "-", one) for one in words}


@pages
def test_links_resolve(path: Path) -> None:
    """A page that was renamed takes its links along. Files outside of docs/ are no part of the site: docs/ names them
    in backticks."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        assert other.is_file() or (other.is_dir() and path.parent != DOCS), f"{target} does not exist"
        assert path.parent != DOCS or other.parent == DOCS, f"{target} is outside of docs/; write it in backticks"
        assert not anchor or anchor in anchors(other), f"{target}: no such heading"


@pages
def test_paths_in_backticks_exist(path: Path) -> None:
    """Inline code whose first part is a folder of the repository is a path there; * and <name> stand for any text."""
    for text in inline_code(path):
        name = re.sub(r"<[^<>]+>", "*", text.split("::")[0])
        if "/" in name and name.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./*-]+", name):
            assert list(REPOSITORY.glob(name.rstrip("/"))), f"`{text}` does not exist"


def recipe_keys(cls: type = Recipe, place: str = "") -> Iterator[str]:
    """The dotted names of all keys and sections of a recipe."""
    hints = typing.get_type_hints(cls)
    for key in dataclasses.fields(cls):
        yield place + key.name
        if dataclasses.is_dataclass(hints[key.name]):
            yield from recipe_keys(hints[key.name], f"{place}{key.name}.")


@pages
def test_recipe_keys_in_backticks_exist(path: Path) -> None:
    """`train.head.kind=mtp`, `rollouts.keep_features: true` and `train.unroll` name keys, unlike file names."""
    known = set(recipe_keys())
    for text in inline_code(path):
        found = re.match(rf"((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?:=|: |$)", text)
        if found and not found[1].endswith((".py", ".json", ".jsonl", ".md", ".sbatch")):
            assert found[1] in known, f"`{text}` is no key of a recipe"
