"""Our target and head as folders that other engines read, for benchmarks/engine_cpu.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.errors import optional_package
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.facts import target_facts

WEIGHTS = "model.safetensors"
TYPES = ("BF16", "Q8_0", "Q4_0")
BOTH_ENDS = ("token_embd.weight", "output.weight")  # of at least 8 bits, as by llama-quantize
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


def gguf_targets(file: Path, out: Path) -> dict[str, Path]:
    """Type of the matrices -> file: the given one, and its weights in BF16, Q8_0 and Q4_0."""
    reader = optional_package("gguf", "--gguf").GGUFReader(file)
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    own = types["blk.0.ffn_up.weight"].name
    made = {kind: requantised(file, kind, out / f"{file.stem}-{kind}.gguf") for kind in TYPES if kind != own}
    return {kind.lower(): path for kind, path in (made | {own: file.resolve()}).items()}


def gguf_heads(file: Path, out: Path, targets: Iterable[str]) -> dict[str, Path]:
    """Type of a target -> the head beside it: as it is beside BF16, else in 8 bits, as beside our quantised targets."""
    packed = requantised(file, "Q8_0", out / "head-Q8_0.gguf")
    return {kind: file if kind in ("bf16", "f16", "f32") else packed for kind in targets}


def requantised(file: Path, kind: str, out: Path) -> Path:
    """A copy of a GGUF file with its matrices in another type, BOTH_ENDS in Q8_0 beside a type of 4 bits."""
    gguf = optional_package("gguf", "--gguf")
    reader, wanted = gguf.GGUFReader(file), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            nested = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=nested)
    for tensor in reader.tensors:
        data, given = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2:
            ends = kind == "Q4_0" and tensor.name in BOTH_ENDS
            new = gguf.GGMLQuantizationType.Q8_0 if ends else wanted
            data, given = gguf.quantize(gguf.dequantize(data, given), new), new
        writer.add_tensor(tensor.name, data, raw_dtype=given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
