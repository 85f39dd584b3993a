"""The drawing in docs/architecture.md: the layers of the package and of infer/, with the imports of the source.

An arrow that a longer way of arrows implies is left out. Positions are in COLUMNS; a new unit needs one there.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.head_kinds import HEAD_KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "toolkit"
# Column (0 to 2) and what a unit is for. Floor 0 is one box.
COLUMNS = {
    "cli": (1, "finds the subcommand"),
    "commands": (1, "parse, call, print"),
    "entries": (0, "run by accelerate launch"),
    "pipeline": (1, "the stages of a run"),
    "train": (1, "loops that improve a head"),
    "bench": (1, "acceptance, reports"),
    "infer": (1, "the engine, at the right"),
    "plan": (2, "deployments elsewhere"),
    "data": (0, "conversations to batches"),
    "checkpoint": (1, "draft directory, formats"),
    "targets": (0, "Hugging Face models"),
    "heads": (1, "the kinds of draft head"),
    "tokenmap": (2, "the draft vocabulary"),
}
INFER_COLUMNS = {
    "server": (1, "HTTP only"),
    "load": (1, "EngineConfig, LLM"),
    "parallel": (1, "tensor parallel processes"),
    "engine": (1, "scheduler, prefill, round"),
    "cpu": (0, "native CPU code"),
    "graphs": (1, "recording and replay"),
    "drafters": (1, "head, n-gram, adaptive"),
    "attention": (0, "metadata, target's forward"),
    "verify": (2, "rules, sampler"),
    "cache": (0, "pages, prefixes"),
    "kernels": (1, "reference and Triton"),
    "request": (1, "requests, draft trees"),
}
WIDTH, HEIGHT, STEP_X, STEP_Y, TOP = 170, 46, 192, 80, 74
INK, FAINT, LINE, PAPER, BOX = "#1f2937", "#6b7280", "#94a3b8", "#ffffff", "#eef2ff"
Edges = dict[str, set[str]]


def block() -> str:
    layers, inside = _stacks()
    package, infer = _imports(PACKAGE, layers), _imports(PACKAGE / "infer", inside)
    package["cli"] = {"commands"}  # imported by name
    upper = {unit: layer for unit, layer in layers.items() if unit in COLUMNS or layer > 0}
    right = 3 * STEP_X + 110
    parts = [
        _stack("toolkit/", "an arrow is an import", upper, COLUMNS, package, 56),
        _base([unit for unit, layer in layers.items() if layer == 0], 56, TOP + 9 * STEP_Y),
        _stack("toolkit/infer/", "the engine", inside, INFER_COLUMNS, infer, right),
    ]
    width, height = right + 3 * STEP_X + 4, TOP + 10 * STEP_Y + 6
    return (
        f'<div>\n<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">\n'
        "<title>The layers of toolkit and the imports between them</title>\n"
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>\n' + "".join(parts) + "</svg>\n</div>"
    )


def _stacks() -> tuple[dict[str, int], dict[str, int]]:
    """The layers of the package and those of infer/, as tests/test_layers.py checks them."""
    checked = runpy.run_path(str(REPOSITORY / "tests" / "test_layers.py"))
    lowest = {path.stem: 0 for path in PACKAGE.glob("*.py")}
    layers = lowest | checked["LAYERS"]
    del layers["__main__"], layers["__init__"]
    return layers, checked["INFER"]


def _imports(folder: Path, units: Mapping[str, int]) -> Edges:
    """What the files of each unit in `folder` import of the others, without what a longer way implies."""
    place = ".".join(("toolkit", *folder.relative_to(PACKAGE).parts, ""))
    edges: Edges = {unit: set() for unit in units}
    for path in folder.rglob("*.py"):
        unit = path.relative_to(folder).parts[0].removesuffix(".py")
        if path.parent == PACKAGE / "train" and path.stem in HEAD_KINDS:
            unit = "entries"
        if unit in edges:
            edges[unit] |= {name for name in _names(path, place) if name in units and name != unit}
    below = {unit: _reached(unit, edges) for unit in edges}
    return {unit: {one for one in to if not any(one in below[other] for other in to)} for unit, to in edges.items()}


def _names(path: Path, place: str) -> set[str]:
    """The units of `place` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        found |= {name.removeprefix(place).split(".")[0] for name in names if name.startswith(place)}
    return found


def _reached(unit: str, edges: Edges) -> set[str]:
    """All units that an import of `unit` leads to."""
    found: set[str] = set()
    waiting = list(edges[unit])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += edges[one]
    return found


def _stack(
    title: str,
    subtitle: str,
    layers: Mapping[str, int],
    columns: Mapping[str, tuple[int, str]],
    edges: Edges,
    left: int,
) -> str:
    top = max(layers.values())
    at = {unit: (left + columns[unit][0] * STEP_X, TOP + (top - layer) * STEP_Y) for unit, layer in layers.items()}
    text = _text(left, 34, title, 19, INK, "600", "start") + _text(left, 54, subtitle, 13, FAINT, anchor="start")
    for layer in sorted(set(layers.values())):
        y = TOP + (top - layer) * STEP_Y
        text += _text(left - 18, y + HEIGHT / 2 + 5, str(layer), 14, FAINT)
        if layer:
            end = left + 2 * STEP_X + WIDTH
            text += f'<line x1="{left}" x2="{end}" y1="{y + 62}" y2="{y + 62}" stroke="#f1f5f9"/>\n'
    for unit in layers:
        for other in sorted(edges[unit] & layers.keys()):
            text += _arrow(at[unit], at[other])
    for unit, (x, y) in at.items():
        text += _box(x, y, WIDTH, unit, columns[unit][1])
    return text


def _base(units: Iterable[str], left: int, y: int) -> str:
    """Floor 0, which every layer may import."""
    names = ", ".join(sorted(units))
    cut = names.rfind(", ", 0, len(names) // 2 + 8) + 1
    width = 2 * STEP_X + WIDTH
    text = _text(left - 18, y + HEIGHT / 2 + 5, "0", 14, FAINT)
    text += f'<rect x="{left}" y="{y}" width="{width}" height="{HEIGHT}" rx="8" fill="#f8fafc" stroke="{LINE}"/>\n'
    for line, dy in ((names[:cut], 20), (names[cut:].strip(), 37)):
        text += _text(left + width / 2, y + dy, line, 12.5, INK)
    return text


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the lower edge of a box to the upper edge of another; round an occupied column, from its side."""
    (x1, y1), (x2, y2) = start, end
    goal = (x2 + WIDTH / 2, y2 - 2)
    if x1 != x2 and y2 - y1 > STEP_Y:
        side = x1 + WIDTH if x2 > x1 else x1
        middle, turn = y1 + HEIGHT / 2, 14 if x2 > x1 else -14
        path = f"M{side} {middle} H{goal[0] - turn} Q{goal[0]} {middle} {goal[0]} {middle + 14} V{goal[1]}"
    else:
        begin = (x1 + WIDTH / 2, y1 + HEIGHT)
        bend = (goal[1] - begin[1]) * 0.6
        path = f"M{begin[0]} {begin[1]} C{begin[0]} {begin[1] + bend} {goal[0]} {goal[1] - bend} {goal[0]} {goal[1]}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#tip)"/>\n'


def _box(x: float, y: float, width: float, title: str, text: str) -> str:
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="8" fill="{BOX}" stroke="#a5b4fc"/>\n'
    return frame + _text(x + width / 2, y + 20, title, 15, INK, "600") + _text(x + width / 2, y + 36, text, 11, FAINT)


def _text(x: float, y: float, text: str, size: float, color: str, weight: str = "400", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>\n'
    )
