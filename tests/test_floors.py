"""The architecture: imports go down, also inside infer/; no two files import each other; serving needs no trainer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "toolkit"
FLOORS = {
    "head_kinds": 0,
    "recipe": 0,
    "recipe_fields": 0,
    "recipe_yaml": 0,
    "train_settings": 0,
    "weights": 0,
    "log": 0,
    "errors": 0,
    "threads": 0,
    "thread_limit": 0,
    "memory": 0,
    "jsonl": 0,
    "chat_rows": 0,
    "terminal": 0,
    "tokenmap": 1,
    "heads": 2,
    "targets": 2,
    "data": 3,
    "checkpoint": 3,
    "infer": 4,
    "plan": 4,
    "bench": 5,
    "train": 6,
    "pipeline": 7,
    "entries": 8,
    "commands": 8,
    "cli": 9,
    "__main__": 10,
}
# The folders of infer/, a stack of its own.
INFER = {
    "request": 0,
    "kernels": 1,
    "cache": 2,
    "attention": 3,
    "verify": 3,
    "drafters": 4,
    "graphs": 5,
    "cpu": 5,
    "engine": 6,
    "parallel": 7,
    "load": 8,
    "server": 9,
}
# Modules of one floor that may import each other: floor 0 has no packages that could drift apart.
SIDEWAYS = {
    ("recipe", "recipe_yaml"),
    ("recipe", "train_settings"),
    ("recipe", "recipe_fields"),
    ("recipe_fields", "head_kinds"),
    ("train_settings", "recipe_fields"),
    ("recipe", "log"),
    ("thread_limit", "log"),
    ("chat_rows", "jsonl"),
    ("train_settings", "recipe_yaml"),
    ("train_settings", "head_kinds"),
}
# `accelerate launch` runs these by path. They call the pipeline, and nothing imports them.
ENTRIES = {"train/dspark.py", "train/eagle3.py", "train/eagle2.py", "train/mtp.py"}
JUNK = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "core", "base"}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return "entries" if inside.as_posix() in ENTRIES else inside.parts[0].removesuffix(".py")


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, parsed."""
    return {
        ".".join(("toolkit", *path.relative_to(PACKAGE).with_suffix("").parts)): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sources()
    }


def names_imported(tree: ast.AST) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions and TYPE_CHECKING blocks too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import (line {node.lineno}); absolute imports only"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "toolkit"}


def imports_of(tree: ast.AST) -> set[str]:
    """Units of toolkit that a file imports."""
    parts = [name.split(".") for name in names_imported(tree)]
    return {name[1] for name in parts if len(name) > 1 and not name[1].startswith("__version")}


def upward(mine: str, other: str, floors: dict[str, int], sideways: set[tuple[str, str]]) -> bool:
    """Whether an import of `other` by `mine` goes up, or sideways where that is not allowed."""
    allowed = mine == other or (mine, other) in sideways
    return not allowed and floors[other] >= floors[mine]


def test_imports_go_down() -> None:
    """An import upwards, or into a sibling, makes a cycle possible and ties a floor to its clients."""
    wrong = []
    for path in sources():
        mine = unit_of(path)
        for other in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            assert other in FLOORS, f"{path}: toolkit.{other} stands on no floor; give it one in this test"
            if upward(mine, other, FLOORS, SIDEWAYS):
                wrong.append(
                    f"{path.relative_to(PACKAGE)} (floor {FLOORS[mine]}) imports {other} (floor {FLOORS[other]})"
                )
    assert not wrong, "\n".join(wrong)


def upward_in_infer(trees: dict[str, ast.Module]) -> list[str]:
    """Imports between folders of infer/ that go up or sideways."""
    wrong = []
    for name, tree in trees.items():
        parts = name.split(".")
        if parts[1] != "infer" or len(parts) < 4:
            continue
        for other in {one.split(".")[2] for one in names_imported(tree) if one.startswith("toolkit.infer.")}:
            assert other in INFER, f"{name} imports toolkit.infer.{other}, which stands on no floor of infer/"
            if upward(parts[2], other, INFER, set()):
                wrong.append(f"{name} imports toolkit.infer.{other}")
    return sorted(wrong)


def test_infer_is_a_stack() -> None:
    """Each folder of infer/ imports only folders below it, so that any of them can be read without those above."""
    up = "def f():\n    from toolkit.infer.engine.engine import Engine"
    down = "import toolkit.infer.request.params\nimport toolkit.infer.cache.page_pool"
    trees = {"toolkit.infer.cache.wrong": ast.parse(up), "toolkit.infer.cache.right": ast.parse(down)}
    assert upward_in_infer(trees) == ["toolkit.infer.cache.wrong imports toolkit.infer.engine"], "the check finds it"
    wrong = upward_in_infer(modules())
    assert not wrong, "\n".join(wrong)


def importers_of_cpu(trees: dict[str, ast.Module]) -> set[str]:
    """Modules outside of infer/cpu/ that import from it."""
    importers = set()
    for name, tree in trees.items():
        inside = name.startswith("toolkit.infer.cpu.")
        if not inside and any(f"{one}.".startswith("toolkit.infer.cpu.") for one in names_imported(tree)):
            importers.add(name)
    return importers


def test_native_cpu_code_has_one_door() -> None:
    """infer/cpu/ can be deleted, and no other file than its door has to change."""
    forms = {
        "toolkit.targets.one": "from toolkit.infer import cpu",
        "toolkit.bench.two": "import toolkit.infer.cpu.int8_linear",
        "toolkit.infer.cpu.inside": "from toolkit.infer.cpu import int8_linear",
        "toolkit.infer.load.other": "from toolkit.infer.engine import cpu_door",
    }
    found = importers_of_cpu({name: ast.parse(text) for name, text in forms.items()})
    assert found == {"toolkit.targets.one", "toolkit.bench.two"}, "the check finds a second door"
    assert importers_of_cpu(modules()) == {"toolkit.infer.engine.cpu_door"}


def test_infer_has_no_loose_files() -> None:
    """Someone new finds the room of any line by the folder names."""
    loose = [path.name for path in (PACKAGE / "infer").glob("*.py") if path.name != "__init__.py"]
    unplaced = {path.name for path in (PACKAGE / "infer").iterdir() if path.is_dir()} - INFER.keys() - {"__pycache__"}
    assert not loose and not unplaced, f"loose files {loose}; folders without a floor {sorted(unplaced)}"


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in imports[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in order:
            visit(module)
    return found


def test_no_cycle_of_files() -> None:
    """Two files that import each other, also by an import inside a function, are one file or need a third."""
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]], "the check itself finds a cycle"
    trees = modules()
    found = cycles({name: names_imported(tree) & trees.keys() - {name} for name, tree in trees.items()})
    assert not found, found


def test_every_unit_stands_on_a_floor() -> None:
    """A new package that nobody placed would be free to import anything."""
    unplaced = {unit_of(path) for path in sources()} - FLOORS.keys()
    assert not unplaced, f"give these a floor: {sorted(unplaced)}"


# Runs CODE in a process where the packages of BLOCKED are absent. transformers asks for their specs and metadata and
# copes with their absence, so these are hidden too.
WITHOUT = """
import importlib, importlib.metadata, importlib.util, pkgutil, sys
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
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in BLOCKED else find(name, package)
CODE
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}, "a blocked package was loaded"
"""


SERVER = {"fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"}
OPTIONAL = {"accelerate", "datasets", "deepspeed", "gguf", "llguidance", "tensorboard", "wandb", *SERVER}


def output_without(blocked: set[str], code: str) -> str:
    """What `code` prints in a process where `blocked` cannot be imported."""
    program = WITHOUT.replace("CODE", code).replace("BLOCKED", repr(blocked))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_imports_without_a_trainer() -> None:
    """Who only serves does not install deepspeed, accelerate, datasets and wandb: every module of infer imports."""
    code = """
import toolkit.infer
names = [m.name for m in pkgutil.walk_packages(toolkit.infer.__path__, "toolkit.infer.")]
for name in names + ["toolkit.commands.serve", "toolkit.commands.chat"]:
    importlib.import_module(name)
print(len(names))
"""
    printed = output_without({"deepspeed", "accelerate", "datasets", "wandb"}, code)
    assert int(printed) > 5, "the walk found no modules; the check checked nothing"


def test_llm_imports_without_a_server() -> None:
    """Who calls the engine from Python installs no web server, and gguf only to open a GGUF file."""
    code = "from toolkit import LLM, SamplingParams; import toolkit.infer.load.worker_main; print(LLM.__name__)"
    assert output_without(OPTIONAL, code) == "LLM\n"


def test_commands_without_the_optional_packages(tiny_draft_directory: Path, tmp_path: Path) -> None:
    """Help and `inspect` need none of them. A command that does names the package and how to install it."""
    (tmp_path / "target.gguf").touch()
    draft, target = str(tiny_draft_directory), str(tmp_path / "target.gguf")
    code = f"""
from toolkit import cli
sys.stderr = sys.stdout
lines = (["--help"], ["inspect", {draft!r}], ["serve", "--target", "t"], ["inspect", {target!r}], ["plan"])
print([cli.main(line) for line in lines])
"""
    printed = output_without(OPTIONAL, code)
    assert printed.endswith("[0, 0, 2, 2, 2]\n"), printed
    for command, package in (("this command", "uvicorn"), ("a GGUF file", "gguf"), ("this command", "pydantic")):
        assert f"error: {command} needs the Python package {package}, which is not installed: pip install" in printed


@pytest.mark.slow
def test_tests_for_a_gpu_collect_without_the_optional_packages() -> None:
    """Where a GPU is at hand there is often torch, Triton and transformers, and little else to install."""
    folders = [f"tests/infer/{name}" for name in ("graphs", "attention", "kernels", "load/test_llm.py")]
    code = f"""
import pytest
assert pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", *{folders!r}]) == 0
"""
    assert output_without(OPTIONAL, code).count("::") > 30


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


def test_nothing_imports_the_entries() -> None:
    """They stand in train/ but call the pipeline above it: an import of one would be a way up."""
    entries = {f"toolkit.{entry.removesuffix('.py').replace('/', '.')}" for entry in ENTRIES}
    assert not {name: found for name, tree in modules().items() if (found := names_imported(tree) & entries)}


def test_entries_run_by_path_define_no_classes() -> None:
    """A class of an entry file lives in `__main__`: it cannot be unpickled in another process."""
    for entry in ENTRIES:
        tree = ast.parse((PACKAGE / entry).read_text(encoding="utf-8"))
        assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], entry


def test_functions_stay_readable() -> None:
    """At most 70 lines a function. A file is as long as its idea."""
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 70:
                    long.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)


def test_tests_mirror_the_package() -> None:
    """Tests of a folder that has moved would stay where nobody looks for them."""
    tests = PACKAGE.parent / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    without = {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()}
    assert without <= {"benchmarks", "docs", "examples", "peers", "pretend_cuda"}, without
