"""Writes an MTP head into a copy of its target's GGUF file, under llama.cpp's names.

All other tensors and metadata keep their bytes.

    copy/NAME.gguf           the target's file with the module; `block_count` and `nextn_predict_layers` count it
    copy/stitched.json       what was written, and the file's sha256
    copy/freq_N.pt           the ids that the head was trained on, if these are not all
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.stitch_native import head_family, new_folder, published_tensors, trained_steps
from toolkit.errors import optional_package
from toolkit.heads.mtp import MtpConfig
from toolkit.targets.facts import TargetFacts
from toolkit.targets.gguf_file import open_gguf
from toolkit.targets.gguf_glm import ARCHITECTURE, MODULES, STEPS, gguf_names
from toolkit.targets.mtp_names import STITCHED
from toolkit.tokenmap.files import save_freq_list
from toolkit.weights import sha256_file, write_json

COUNTS = (f"{ARCHITECTURE}.block_count", f"{ARCHITECTURE}.{MODULES}", STEPS)


def is_stitched_as_gguf(facts: TargetFacts) -> bool:
    """Whether the target is a GGUF file of an architecture whose modules llama.cpp serves and that is read here."""
    return facts.name.endswith(".gguf") and facts.model_type == "glm4_moe"


def stitch_gguf(draft: DraftCheckpoint, facts: TargetFacts, out: Path, shape: Shape) -> tuple[str, list[str]]:
    """Write the head into a copy of the target's file, in the new folder `out`. Returns a launch line and notes.

    Matrices of the module have the type that they replace if that is a float type, else bfloat16 (float32 in a float32
    file). Raises `ExportError` for a head that is not in the form of the family, an existing `out`, and when the copy
    does not read back as the same head; then nothing is left behind.
    """
    with new_folder(out) as temporary:
        family = head_family(draft, facts)
        source = open_gguf(Path(facts.name))
        before = source.get_field(COUNTS[1])
        assert isinstance(draft.head.config, MtpConfig), "head_family lets only MTP heads pass"
        count = max(draft.head.config.num_mtp_layers, before.contents() if before else 0)
        if count != 1:
            raise ExportError(f"the head or {facts.name} has {count} MTP modules; llama.cpp runs one of {family.title}")
        module = _module(source, published_tensors(draft, family, facts), facts.n_layers + count)
        numbers = {COUNTS[0]: facts.n_layers + count, COUNTS[1]: count}
        steps, name = trained_steps(draft), Path(facts.name).name
        if steps is not None:
            numbers[STEPS] = steps
        _write(source, temporary / name, module, numbers)
        wrong = _differences(source, open_gguf(temporary / name), module, numbers)
        if wrong:
            raise ExportError(
                f"the copy does not read back as the target with this head: {', '.join(wrong[:5])} differ. It was "
                "deleted. This is a bug in the exporter; please report it"
            )
        kept, notes = draft.token_map, []
        if kept.size < kept.vocab_size:
            save_freq_list(temporary / f"freq_{kept.size}.pt", kept)
            notes.append(
                f"the head was trained on {kept.size} ids, and a GGUF file holds no token map: llama.cpp drafts all "
                f"ids, and so does toolkit without --token-map {out / f'freq_{kept.size}.pt'}"
            )
        record = {
            "target": {"name": facts.name, "revision": facts.revision},
            "family": family.title,
            "trained_steps": steps,
            "tensors": sorted(module),
            "other_tensors": len({tensor.name for tensor in source.tensors} - module.keys()),
            "files_copied": [],
            "files_written": [name],
            "sha256": {name: sha256_file(temporary / name)},
        }
        write_json(temporary / STITCHED, record)
    path = out.resolve() / name
    served = f"llama-server -m {path} --spec-type draft-mtp --spec-draft-n-max {shape.chain}"
    return f"toolkit serve --target {path}", [f"llama.cpp: {served}", *notes]


def _module(source: Any, tensors: dict[str, Tensor], n_blocks: int) -> dict[str, tuple[np.ndarray, Any]]:
    """The module's tensors by their GGUF names, with their types; the experts of a layer are one tensor."""
    gguf = optional_package("gguf", "a GGUF file")

    types = gguf.GGMLQuantizationType
    before = {tensor.name: tensor.tensor_type for tensor in source.tensors}
    fresh = types.F32 if before["token_embd.weight"] == types.F32 else types.BF16
    found = {}
    for name, published in gguf_names(tensors, n_blocks).items():
        parts = [tensors[one].float().numpy() for one in published]
        value = np.stack(parts) if "_exps." in name else parts[0]
        kind = before.get(name, fresh)
        kind = types.F32 if value.ndim == 1 or "ffn_gate_inp" in name else kind  # as llama.cpp's converter does
        kind = kind if kind in (types.F32, types.F16, types.BF16) else fresh
        found[name] = (gguf.quantize(value, kind), kind)
    return found


def _write(source: Any, out: Path, module: dict[str, tuple[np.ndarray, Any]], numbers: dict[str, int]) -> None:
    gguf = optional_package("gguf", "a GGUF file")

    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    writer.data_alignment = int(source.alignment)
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *COUNTS):
            nested = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=nested)
    for name, value in numbers.items():
        writer.add_uint32(name, value)
    kept = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in source.tensors}
    for name, (data, kind) in (kept | module).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _differences(
    source: Any, copy: Any, module: dict[str, tuple[np.ndarray, Any]], numbers: dict[str, int]
) -> list[str]:
    """Names of tensors and metadata that are not as they should be in the copy."""
    wanted = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in source.tensors} | module
    written = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in copy.tensors}
    wrong = sorted(wanted.keys() ^ written.keys())
    for name in sorted(wanted.keys() & written.keys()):
        (mine, own), (theirs, kind) = wanted[name], written[name]
        if own != kind or mine.tobytes() != theirs.tobytes():
            wrong.append(name)
    fields = [
        {name: one for name, one in file.fields.items() if not name.startswith("GGUF.") and name not in COUNTS}
        for file in (source, copy)
    ]
    wrong += sorted(fields[0].keys() ^ fields[1].keys())
    for name in fields[0].keys() & fields[1].keys():
        if [part.tobytes() for part in fields[0][name].parts] != [part.tobytes() for part in fields[1][name].parts]:
            wrong.append(name)
    return wrong + [name for name, value in numbers.items() if copy.fields[name].contents() != value]
