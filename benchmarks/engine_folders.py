"""Our target and head as folders that other engines read, for benchmarks/engine_cpu.py."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.facts import target_facts

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def exported(head: DraftCheckpoint, to: str, out: Path, target: str, revision: str | None, shape: DraftShape) -> str:
    """`toolkit export` of the head into a new folder. Raises what export_head raises."""
    export_head(head, to, out, target_facts(target, revision), Shape(*map(int, shape.as_text().split(","))))
    return str(out.resolve())


def eagle_target(directory: str, out: Path) -> str:
    """A folder with links to the target's files, and what EAGLE's code and its transformers 4 look for beside them:
    an index of the weights, where it finds the embedding, and rope and tokenizer by their old names.

    Raises BenchError for a target that is no local directory, or whose rope has no such name.
    """
    source = Path(directory).resolve()
    if not (source / "config.json").is_file():
        raise BenchError(f"EAGLE's own engine needs the target in a local directory; {directory} came")
    config = _settings(source / "config.json")
    ropes = config.get("rope_parameters") or {}
    if ropes.get("rope_type", "default") != "default":
        raise BenchError(f"EAGLE's own engine is not told of the target's rope {ropes['rope_type']!r} here")
    config = {"rope_scaling": None, "torch_dtype": config.get("dtype"), **ropes, **config}
    out.mkdir(parents=True)
    for file in source.iterdir():
        (out / file.name).symlink_to(file)
    _replace(out / "config.json", config)
    tokenizer = _settings(source / "tokenizer_config.json")
    _replace(out / "tokenizer_config.json", {**tokenizer, "tokenizer_class": "PreTrainedTokenizerFast"})
    if not (source / INDEX).is_file():
        with safe_open(source / WEIGHTS, "pt") as tensors:
            _replace(out / INDEX, {"weight_map": dict.fromkeys(tensors.keys(), WEIGHTS)})
    return str(out)


def _settings(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def _replace(file: Path, settings: dict) -> None:
    file.unlink(missing_ok=True)  # a link: what it points to stays as it is
    file.write_text(json.dumps(settings), encoding="utf-8")
