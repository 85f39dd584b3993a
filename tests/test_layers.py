"""The architecture: imports go down, also inside infer/; functions stay readable; serving needs no trainer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "toolkit"
# Modules of the lowest layer, and packages: the lowest layer may import itself, the others only what is below.
LAYERS = {
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
# `accelerate launch` runs these by path. They call the pipeline, and nothing imports them.
ENTRIES = {"train/dspark.py", "train/eagle3.py", "train/eagle2.py", "train/mtp.py"}


def sources() -> dict[str, ast.Module]:
    """Every file of the package by its path inside, parsed."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


SOURCES = sources()


def names_imported(tree: ast.AST) -> set[tuple[str, ...]]:
    """Dotted names inside toolkit that a file imports anywhere, inside functions and TYPE_CHECKING blocks too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import (line {node.lineno}); absolute imports only"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [tuple(name.split(".")) for name in found]
    return {name[1:] for name in parts if name[0] == "toolkit" and len(name) > 1 and not name[1].startswith("__")}


def test_imports_go_down() -> None:
    """An import upwards, or into a sibling, makes a cycle possible and ties a layer to its clients."""
    wrong = []
    for path, tree in SOURCES.items():
        mine = "entries" if path in ENTRIES else path.split("/")[0].removesuffix(".py")
        assert mine in LAYERS or "/" not in path, f"{path} stands in no layer; give its package one in this test"
        for other in {name[0] for name in names_imported(tree)} - {mine}:
            here, there = LAYERS.get(mine, 0), LAYERS.get(other, 0)
            if there >= max(here, 1):
                wrong.append(f"{path} (layer {here}) imports {other} (layer {there})")
    assert not wrong, "\n".join(wrong)


def test_infer_is_a_stack() -> None:
    """Each folder of infer/ imports only folders below it, and cpu/ is known to the construction of an engine alone."""
    wrong = []
    for path, tree in SOURCES.items():
        inside = names_imported(tree)
        folders = {name[1] for name in inside if name[0] == "infer" and len(name) > 2}
        mine = path.split("/")[1] if path.startswith("infer/") else None
        if "cpu" in folders and mine != "cpu" and path != "infer/engine/cpu_door.py":
            wrong.append(f"{path} imports infer.cpu")
        if mine is not None and mine != "__init__.py":
            wrong += [f"{path} imports infer.{one}" for one in folders - {mine} if INFER[one] >= INFER[mine]]
    assert not wrong, "\n".join(wrong)


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
TRAINER = {"accelerate", "datasets", "deepspeed", "wandb"}
OPTIONAL = {
    *TRAINER,
    "fastapi",
    "gguf",
    "llguidance",
    "openai",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
}


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
    assert int(output_without(TRAINER, code)) > 5, "the walk found no modules; the check checked nothing"


def test_llm_imports_without_a_server() -> None:
    """Who calls the engine from Python installs no web server, and `toolkit --help` needs no further package."""
    code = """
from toolkit import LLM, SamplingParams, cli
import toolkit.infer.load.load_engine
print(cli.main(["--help"]), cli.main(["serve", "--target", "t"]), LLM.__name__)
"""
    assert output_without(OPTIONAL, code).endswith("0 2 LLM\n")


def test_functions_stay_readable() -> None:
    """At most 70 lines a function. A file is as long as its idea."""
    long = []
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 70:
                    long.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)
