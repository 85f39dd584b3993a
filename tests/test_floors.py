"""The architecture: imports go down, serving needs no trainer, names say what is inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "toolkit"
FLOORS = {
    "recipe": 0,
    "recipe_yaml": 0,
    "recipe_checks": 0,
    "weights": 0,
    "log": 0,
    "errors": 0,
    "threads": 0,
    "memory": 0,
    "jsonl": 0,
    "chat_roles": 0,
    "tokenmap": 1,
    "models": 2,
    "target": 2,
    "data": 3,
    "checkpoint": 3,
    "infer": 4,
    "plan": 4,
    "bench": 5,
    "train": 6,
    "commands": 7,
    "cli": 8,
    "__main__": 9,
}
# Modules of one floor that may import each other: floor 0 has no packages that could drift apart.
SIDEWAYS = {("recipe", "recipe_yaml"), ("recipe", "recipe_checks"), ("recipe", "log"), ("recipe_checks", "recipe_yaml")}
JUNK = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "core", "base"}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(tree: ast.AST) -> set[str]:
    """Units of toolkit that a file imports anywhere, inside functions and TYPE_CHECKING blocks too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import (line {node.lineno}); absolute imports only"
            whole = node.module == "toolkit"
            names = [f"toolkit.{alias.name}" for alias in node.names] if whole else [node.module or ""]
        else:
            continue
        parts = [name.split(".") for name in names if name.split(".")[0] == "toolkit"]
        found |= {name[1] for name in parts if len(name) > 1 and not name[1].startswith("__version")}
    return found


def test_imports_go_down() -> None:
    """An import upwards, or into a sibling, makes a cycle possible and ties a floor to its clients."""
    wrong = []
    for path in sources():
        mine = unit_of(path)
        for other in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            assert other in FLOORS, f"{path}: toolkit.{other} stands on no floor; give it one in this test"
            if other != mine and (mine, other) not in SIDEWAYS and FLOORS[other] >= FLOORS[mine]:
                wrong.append(
                    f"{path.relative_to(PACKAGE)} (floor {FLOORS[mine]}) imports {other} (floor {FLOORS[other]})"
                )
    assert not wrong, "\n".join(wrong)


def test_every_unit_stands_on_a_floor() -> None:
    """A new package that nobody placed would be free to import anything."""
    unplaced = {unit_of(path) for path in sources()} - FLOORS.keys()
    assert not unplaced, f"give these a floor: {sorted(unplaced)}"


def test_serving_imports_without_a_trainer() -> None:
    """Who only serves does not install deepspeed, accelerate, datasets and wandb.

    Every module of infer is imported in a process where those four cannot be. transformers asks for their specs and
    metadata and copes with their absence, so these are hidden too.
    """
    code = """
import importlib, importlib.metadata, pkgutil, sys
BLOCKED = {"deepspeed", "accelerate", "datasets", "wandb"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
version = importlib.metadata.version
def hidden(name):
    if name in BLOCKED:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in BLOCKED else find(name, package)
import toolkit.infer
names = [m.name for m in pkgutil.walk_packages(toolkit.infer.__path__, "toolkit.infer.")]
for name in names + ["toolkit.commands.serve", "toolkit.commands.chat"]:
    importlib.import_module(name)
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}, "a blocked package was loaded"
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5, "the walk found no modules; the check checked nothing"


def test_no_junk_drawers() -> None:
    """A file called `utils` has no reason to refuse anything."""
    names = {part.removesuffix(".py") for path in sources() for part in path.relative_to(PACKAGE).parts}
    assert not names & JUNK


def test_no_file_in_train_hides_the_standard_library() -> None:
    """`accelerate launch toolkit/train/eagle3.py` puts toolkit/train at the head of the search path for a moment.

    A file there called `queue` or `statistics` would be imported in place of Python's own.
    """
    names = {path.stem for path in (PACKAGE / "train").glob("*.py")} - {"__init__"}
    assert not names & set(sys.stdlib_module_names)


def test_entries_run_by_path_define_no_classes() -> None:
    """A class of an entry file lives in `__main__`: it cannot be unpickled in another process."""
    for entry in ("eagle3.py", "eagle2.py", "mtp.py"):
        tree = ast.parse((PACKAGE / "train" / entry).read_text(encoding="utf-8"))
        assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], entry


def test_files_and_functions_stay_readable() -> None:
    """The house's size limits: 320 lines a file, 70 a function."""
    long = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 320:
            long.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 70:
                    long.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)
