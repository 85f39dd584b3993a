"""Writes an MTP head into a copy of its target's checkpoint, under the names of the target's family.

All other tensors keep their bytes. Engines that serve the family's MTP modules then need no other file.

    copy/config.json                  the number of modules, if the target had none
    copy/model-*.safetensors          files without the module are copied; with it, they are written again
    copy/model-mtp.safetensors        the module, if the target had none
    copy/stitched.json                what was written, and the sha256 of every weights file
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.launch_lines import Shape, sglang_speculation, vllm_speculation
from toolkit.checkpoint.native_mtp import find_native, module_config, module_head, quantised_names
from toolkit.heads.families import NativeFamily, at, family_model, family_of
from toolkit.heads.mtp import MtpConfig
from toolkit.targets.facts import CONFIG, INDEX, SINGLE, TargetFacts, read_tensors, target_facts, tensor_names
from toolkit.targets.mtp_names import STITCHED
from toolkit.tokenmap.files import load_freq_list, save_freq_list
from toolkit.weights import load_tensors, read_json, save_tensors, sha256_file, write_json

FRESH = "model-mtp.safetensors"


def stitch(
    draft: DraftCheckpoint, facts: TargetFacts, out: str | Path, shape: Shape, token_map: str | Path | None = None
) -> tuple[str, list[str]]:
    """Write the head into a copy of the target, the new folder `out`. Returns a launch line and notes for the user.

    token_map: a file of the ids to draft, written beside it as freq_N.pt; None: those of the draft. Raises TargetError
    for a target without safetensors weights, and `ExportError` for a head that is not in the form of the target's
    family, a quantised module, an existing `out`, and when the copy does not read back as the same head; then nothing
    is left behind.
    """
    out = Path(out)
    with new_folder(out) as temporary:
        family = head_family(draft, facts)
        files = tensor_names(facts)
        source = _folder(facts)
        tensors = published_tensors(draft, family, facts)
        found = find_native(facts)
        if found is not None:
            tensors = _as_before(tensors, read_tensors(facts, found.names), facts)
        changed = {files[name] for name in tensors if name in files}
        weights = set(files.values())
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in changed and not path.name.startswith("."):
                shutil.copyfile(path, temporary / path.name)
        for name in sorted(changed):
            _write_again(source / name, temporary / name, tensors)
        if found is None:
            _add(temporary, files, tensors, draft, family)
        notes = _notes(draft, facts, str(out.resolve()), shape)
        kept = draft.token_map if token_map is None else load_freq_list(token_map, facts.vocab_size)
        map_file = f"freq_{kept.size}.pt" if kept.size < kept.vocab_size else None
        if map_file is not None:
            save_freq_list(temporary / map_file, kept)
            notes.append(
                f"toolkit drafts the {kept.size} ids in {map_file}; SGLang does with --speculative-token-map "
                f"{out / map_file}"
            )
        _check(draft, family, temporary, facts, tensors)
        hashes = {path.name: sha256_file(path) for path in sorted(temporary.glob("*.safetensors"))}
        untouched = sorted(name for name in weights - changed)
        for name in untouched:
            if hashes[name] != sha256_file(source / name):
                raise ExportError(f"{name} of the copy is not the target's file; the copy was deleted, write it again")
        record = {
            "target": {"name": facts.name, "revision": facts.revision},
            "family": family.title,
            "trained_steps": trained_steps(draft),
            "token_map": map_file,
            "tensors": sorted(tensors),
            "other_tensors": len(files.keys() - tensors.keys()),
            "files_copied": untouched,
            "files_written": sorted(hashes.keys() - set(untouched)),
            "sha256": hashes,
        }
        write_json(temporary / STITCHED, record)
    return f"toolkit serve --target {out.resolve()}", notes


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` when the block ends; it is deleted on errors.

    Raises `ExportError` if `out` exists."""
    if out.exists():
        raise ExportError(f"{out} exists; give a new folder, or move this one away")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.part-"))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes private folders
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def trained_steps(draft: DraftCheckpoint) -> int | None:
    """The steps that the head was unrolled for in training, if its record says so."""
    return (draft.meta.get("training") or {}).get("unroll", {}).get("ttt_steps")


def head_family(draft: DraftCheckpoint, facts: TargetFacts) -> NativeFamily:
    """The row of the target's family. Raises `ExportError` if the head does not have its form."""
    config, family = draft.head.config, family_of(facts.model_type)
    if not isinstance(config, MtpConfig):
        raise ExportError(f"a {draft.kind} head is no MTP module, so it has no place in a target; export it with --to")
    if family.refused is not None:
        raise ExportError(f"{facts.name} ({family.title}) is not written: {family.refused}")
    if family.most is not None and config.num_mtp_layers > family.most:
        raise ExportError(f"the head has {config.num_mtp_layers} layers; {family.title} has {family.most}")
    wanted = module_config(family, config.num_mtp_layers, facts.config, facts.vocab_size)
    differing = [
        name
        for name, value in wanted.to_dict().items()
        if name not in ("rope_parameters", "max_position_embeddings") and config.to_dict()[name] != value
    ]
    if differing:
        what = "the layer of another family" if "layer_config" in differing else ", ".join(differing)
        raise ExportError(
            f"the head is not in the form of {family.title} modules of {facts.name}: it has {what}; train one with "
            "train.head.init=native, or a fresh one for this target"
        )
    return family


def _folder(facts: TargetFacts) -> Path:
    """The folder of the target's files; a hub id is downloaded whole."""
    if Path(facts.source).is_dir():
        return Path(facts.source)
    return Path(snapshot_download(facts.source, revision=facts.revision))


@torch.no_grad()
def published_tensors(draft: DraftCheckpoint, family: NativeFamily, facts: TargetFacts) -> dict[str, Tensor]:
    """The head's tensors by the family's names, experts one by one."""
    config, state = draft.head.config, draft.head.state_dict()
    assert isinstance(config, MtpConfig), "head_family lets only MTP heads pass"
    found: dict[str, Tensor] = {}
    for k in range(config.num_mtp_layers):
        found |= {name: state.pop(own) for name, own in family.parts(k, facts.n_layers).items()}
    if config.layer_config is None:
        layers = state
    else:
        model = family_model(config.layer_config)
        own = {name.removeprefix("layers."): value for name, value in state.items()}
        model.get_decoder().layers.load_state_dict(own)
        model.to(dtype=dtype_of(draft.head.state_dict()))  # type: ignore[call-arg]  # the stub has lost its self
        for name, buffer in model.get_decoder().layers.named_buffers():
            buffer.data = own[name].clone() if name in own else buffer
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)  # transformers writes the names of published checkpoints
            saved = load_tensors(Path(folder) / SINGLE)
        body = f"{model.base_model_prefix}."
        layers = {name.removeprefix(body): value for name, value in saved.items() if name.startswith(f"{body}layers.")}
    for name, value in layers.items():
        _, number, rest = name.split(".", 2)
        found[f"{at(family.block, int(number), facts.n_layers)}{rest}"] = value
    return found


def _as_before(tensors: dict[str, Tensor], before: dict[str, Tensor], facts: TargetFacts) -> dict[str, Tensor]:
    """The tensors in the dtypes of the module that they replace. Raises `ExportError` if they are not the same ones."""
    quantised = quantised_names(before)
    if quantised:
        raise ExportError(
            f"the MTP module of {facts.name} is quantised ({', '.join(quantised[:3])}, ...); only modules in bfloat16, "
            "float16 or float32 are written: give the target's unquantised checkpoint"
        )
    lacking = sorted(name for name in tensors if name not in before or before[name].shape != tensors[name].shape)
    if lacking:
        raise ExportError(f"the MTP module of {facts.name} has no such tensors: {', '.join(lacking[:5])}")
    return {name: value.to(before[name].dtype).contiguous() for name, value in tensors.items()}


def _write_again(source: Path, out: Path, tensors: dict[str, Tensor]) -> None:
    """Write a weights file with the module's tensors replaced."""
    with safe_open(source, framework="pt") as weights:
        metadata = weights.metadata() or {"format": "pt"}
        kept = {name: tensors.get(name, None) for name in weights.keys()}  # noqa: SIM118 (no dict)
        whole = {name: weights.get_tensor(name) if value is None else value for name, value in kept.items()}
    save_tensors(out, whole, metadata)


def _add(
    copy: Path, files: dict[str, str], tensors: dict[str, Tensor], draft: DraftCheckpoint, family: NativeFamily
) -> None:
    """Add a module to a copy that has none: a weights file, its entries in the index, and the number of modules."""
    save_tensors(copy / FRESH, tensors)
    index = read_json(copy / INDEX) if (copy / INDEX).is_file() else {"metadata": {}}
    if "total_size" in index.get("metadata", {}):
        index["metadata"]["total_size"] += sum(value.nbytes for value in tensors.values())
    write_json(copy / INDEX, {**index, "weight_map": {**files, **dict.fromkeys(tensors, FRESH)}})
    config: dict[str, Any] = read_json(copy / CONFIG)
    if family.count_key is not None:
        assert isinstance(draft.head.config, MtpConfig)
        count = {family.count_key: draft.head.config.num_mtp_layers}
        text = config.get("text_config")
        config = {**config, **count} if text is None else {**config, "text_config": {**text, **count}}
        write_json(copy / CONFIG, config)


def _check(
    draft: DraftCheckpoint, family: NativeFamily, copy: Path, facts: TargetFacts, tensors: dict[str, Tensor]
) -> None:
    """Read the copy back. Raises `ExportError` if it holds another head, or other tensors of the target."""
    written = target_facts(copy)
    found = find_native(written)
    assert isinstance(draft.head.config, MtpConfig) and found is not None, "the copy has the module that was written"
    back = read_tensors(written, tensors)
    head = module_head(family, back, found.count, facts.config, facts.vocab_size, "the copy's module").state_dict()
    state = draft.head.state_dict()
    wrong = sorted(name for name in state.keys() | head.keys() if not _equal(state.get(name), head.get(name)))
    files = tensor_names(facts)
    for file in sorted({files[name] for name in tensors if name in files}):  # the others are copies of whole files
        mine, theirs = load_tensors(copy / file), load_tensors(_folder(facts) / file)
        kept = sorted(theirs.keys() - tensors.keys())
        wrong += sorted(mine.keys() ^ theirs.keys())
        wrong += [name for name in kept if name in mine and not torch.equal(_bytes(mine[name]), _bytes(theirs[name]))]
    if wrong:
        raise ExportError(
            f"the copy does not read back as the target with this head: {', '.join(wrong[:5])} differ. It was deleted. "
            "This is a bug in the exporter; please report it"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _equal(mine: Tensor | None, back: Tensor | None) -> bool:
    """Whether a tensor is the same after it was written in the module's dtype."""
    if mine is None or back is None:
        return False
    return torch.equal(mine.to(back.dtype), back)


def _notes(draft: DraftCheckpoint, facts: TargetFacts, out: str, shape: Shape) -> list[str]:
    """The launch lines of other engines, which serve the family's own modules."""
    if family_of(facts.model_type).title == "DeepSeek's form":
        return [f"other engines serve no MTP module in a {facts.model_type} model; toolkit does"]
    sglang = " ".join(sglang_speculation(draft.kind, None, shape))
    config = str(vllm_speculation(draft.kind, None, shape)).replace("'", '"')
    return [
        f"SGLang: python -m sglang.launch_server --model-path {out} {sglang}",
        f"vLLM: vllm serve {out} --speculative-config '{config}'",
    ]
