"""MTP modules in their target's own checkpoint: read as draft heads, and written into a copy of the target.

`heads/families.py` says how each family names the module's parts and what they compute; reading and writing use that
table alone. The decoder layer is the family's own class in transformers (`heads/families.py`). Every tensor under
the module's names is used, or must equal the target's (embedding, output matrix); others are errors. A copy keeps the
bytes of all other tensors, so that engines that serve the family's modules need no other file:

    copy/config.json                  the number of modules, if the target had none
    copy/model-*.safetensors          files without the module are copied; with it, they are written again
    copy/model-mtp.safetensors        the module, if the target had none
    copy/stitched.json                what was written, and the sha256 of every weights file
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of, embedding_problem
from toolkit.checkpoint.files import new_folder
from toolkit.checkpoint.launch_lines import Shape, sglang_speculation, vllm_speculation
from toolkit.errors import DraftDirError, ExportError, TargetError
from toolkit.heads.families import OTHERS, NativeFamily, at, family_model, family_of, layer_config
from toolkit.heads.head_config import HeadError
from toolkit.heads.mtp import LLAMA_LIKE, MtpConfig, MtpHead
from toolkit.log import get_logger
from toolkit.targets.facts import (
    CONFIG,
    INDEX,
    NATIVE_MTP_KEYS,
    SINGLE,
    TargetFacts,
    read_tensors,
    stated_config,
    target_facts,
    target_file,
    tensor_names,
)
from toolkit.targets.target import Target
from toolkit.tokenmap.files import load_freq_list, save_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_strict, load_tensors, read_json, save_tensors, sha256_file, write_json

log = get_logger(__name__)

STITCHED = "stitched.json"  # the record in copies
FRESH = "model-mtp.safetensors"
# Tensors that only quantised checkpoints have.
QUANTISED = re.compile(r"\.(weight_scale(_inv)?|weight_scale_2|weight_packed|qweight|qzeros|scales|input_scale)$")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class NativeModules:
    """The MTP modules in a target's files: their number, and the names of their tensors."""

    family: NativeFamily
    count: int
    names: tuple[str, ...]


def find_native(facts: TargetFacts) -> NativeModules | None:
    """The MTP modules of a target, by the names of its tensors; None if it has none. Reads no tensor.

    Raises TargetError if the target has no safetensors weights, DraftDirError if some modules are missing.
    """
    family, names = family_of(facts.model_type), tuple(tensor_names(facts))
    count = 0
    while any(name.startswith(at(family.block, count, facts.n_layers)) for name in names):
        count += 1
    begun = any(name.startswith(at(family.root, 0, facts.n_layers)) for name in names)
    if family is OTHERS:  # further layers alone make no module
        begun = f"{at(family.eh_proj, 0, facts.n_layers)}.weight" in names
    own = stated_config(facts.source, facts.revision)
    count = max(count, 1) if begun else 0
    stated = next((own[key] for key in NATIVE_MTP_KEYS if own.get(key)), count)
    if stated == count == 0:
        return None
    if stated != count:
        raise DraftDirError(
            f"the config of target {facts.name} states {stated} MTP modules, and its weights hold {count or 'none'}; "
            "download it again, or decode without the modules (`draft` none)"
        )
    roots = tuple({at(family.root, k, facts.n_layers) for k in range(count)})
    return NativeModules(family, count, tuple(name for name in names if name.startswith(roots)))


def native_of(target: Target | TargetFacts) -> tuple[TargetFacts, NativeModules]:
    """The MTP modules of a target. Raises TargetError if it has none, and the errors of `find_native`."""
    facts = target_facts(target.name, target.revision)
    found = find_native(facts)
    if found is None:
        raise TargetError(
            f"{target.name} has no MTP module in its checkpoint, from which train.head.init=native would start; set "
            "train.head.init=target"
        )
    return facts, found


def why_unread(found: NativeModules) -> str | None:
    """Why the engine does not draft with these modules, as far as the names tell; None: it does."""
    family = found.family
    if family.refused is None and family.most is not None and found.count > family.most:
        return f"{found.count} modules are found, {family.most} is read"
    return family.refused or _said_quantised([name for name in found.names if QUANTISED.search(name)])


def _said_quantised(names: list[str]) -> str | None:
    usable = "use a checkpoint whose module is in bfloat16, float16 or float32"
    return f"it is quantised ({', '.join(names[:3])}, ...); {usable}" if names else None


@torch.no_grad()
def load_native(target: Target, facts: TargetFacts, found: NativeModules) -> DraftCheckpoint:
    """The modules as a head of kind "mtp", on the CPU, in the dtype of the checkpoint.

    Raises DraftDirError for a family, quantisation or number of modules that is not read, and for an embedding or
    output matrix that is not the target's; WeightsError for tensors that are missing, unexpected or of a wrong shape.
    """
    family, count = found.family, found.count
    what = f"the MTP module of {facts.name} ({family.title})"
    why = why_unread(found)
    if why is None:
        tensors = read_tensors(facts, found.names)
        why = _said_quantised(_quantised(tensors))
    if why is not None:
        raise DraftDirError(f"{what} is not read: {why}; decode without it (`draft` none)")
    for k in range(count):
        _check_repeated(family, tensors, k, target, what)
    try:
        head = module_head(family, tensors, count, target.config, target.vocab_size, what)
        head.kv_sizes()
    except HeadError as error:
        raise DraftDirError(f"{what} cannot be used: {error}; decode without it (`draft` none)") from error
    record = target_file(facts.source, facts.revision, STITCHED)
    stitched = {} if record is None else read_json(record)
    meta = {
        "target": {"name": facts.name, "revision": facts.revision, "fingerprint": target.fingerprint},
        "native": {"family": family.title, "modules": count, "trained_steps": stitched.get("trained_steps") or count},
    }
    return DraftCheckpoint(head=head, token_map=_token_map(facts, stitched, target.vocab_size), meta=meta)


def _token_map(facts: TargetFacts, stitched: Mapping[str, Any], vocab_size: int) -> TokenMap:
    """The ids that a tuned module drafts: those of the list beside it, else all."""
    name = stitched.get("token_map")
    path = None if name is None else target_file(facts.source, facts.revision, name)
    if name is not None and path is None:
        raise DraftDirError(f"{facts.name} lacks {name}, which its {STITCHED} names; copy the target again")
    return TokenMap.identity(vocab_size) if path is None else load_freq_list(path, vocab_size)


def _quantised(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that only a quantised module has."""
    return sorted(name for name, one in tensors.items() if QUANTISED.search(name) or one.dtype not in FLOATS)


def module_config(family: NativeFamily, count: int, config: Any, vocab_size: int) -> MtpConfig:
    """The configuration of `count` modules of a family; config: the target's (text) configuration."""
    return MtpConfig.from_target_config(
        config,
        vocab_size=vocab_size,
        num_mtp_layers=count,
        layer_config=None if config.model_type in LLAMA_LIKE else layer_config(config, count, **family.layer),
        **family.variants,
    )


@torch.no_grad()
def module_head(
    family: NativeFamily, tensors: Mapping[str, Tensor], count: int, config: Any, vocab_size: int, what: str
) -> MtpHead:
    """The head of a module's tensors, by their names in the checkpoint. Raises WeightsError unless all are used."""
    own, n_layers = module_config(family, count, config, vocab_size), config.num_hidden_layers
    left = dict(tensors)
    of_head: dict[str, Tensor] = {}
    of_layers: dict[str, Tensor] = {}
    for k in range(count):
        of_head |= {mine: left.pop(name) for name, mine in family.parts(k, n_layers).items() if name in left}
        block = at(family.block, k, n_layers)
        for name in [name for name in left if name.startswith(block)]:
            of_layers[f"layers.{k}.{name.removeprefix(block)}"] = left.pop(name)
    if left:
        raise WeightsError(f"{what} has tensors that are unknown: {', '.join(sorted(left))}")
    head = MtpHead(own)
    layers = of_layers if own.layer_config is None else _layer_state(own, of_layers, what)
    load_strict(head, {**of_head, **layers}, what)
    return head.cast("cpu", next(iter(of_head.values())).dtype).eval().requires_grad_(False)


def _check_repeated(family: NativeFamily, tensors: dict[str, Tensor], k: int, target: Target, what: str) -> None:
    """Take the module's copies of the target's embedding and output matrix out of `tensors`.

    Raises DraftDirError if they are not copies."""
    for name, mine in ((family.embedding, target.embed_tokens), (family.output, target.lm_head)):
        if name is None:
            continue
        copied = tensors.pop(at(name, k, target.n_layers), None)
        if copied is None:
            log.info("%s has no %s of its own: the target's is used", what, at(name, k, target.n_layers))
        elif embedding_problem(copied, mine.weight.detach().cpu()) is not None:
            raise DraftDirError(
                f"{what} has a {at(name, k, target.n_layers)} that is not the target's, which the engine would use in "
                "its place; decode without the module (`draft` none)"
            )


def _layer_state(config: MtpConfig, tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The decoder layers' tensors under the names of the family's class. transformers converts them (it joins experts).

    tensors: by names of the published checkpoints, "layers.0.mlp.experts.0.up_proj.weight".
    """
    assert config.layer_config is not None, "the layers are of a family's class"
    with torch.device("meta"):
        model = family_model(config.layer_config)
    body, dtype = model.base_model_prefix, next(iter(tensors.values())).dtype
    # from_pretrained wants a whole model: what is not a layer is filled.
    whole = {
        name: torch.zeros(value.shape, dtype=dtype)
        for name, value in model.state_dict().items()
        if not name.startswith(f"{body}.layers.")
    }
    whole |= {f"{body}.{name}": value for name, value in tensors.items()}
    try:
        # Any: output_loading_info makes the result a pair, which the declared type lacks.
        pair: Any = type(model).from_pretrained(
            None, config=model.config, state_dict=whole, output_loading_info=True, dtype="auto"
        )
    except RuntimeError as error:  # some of a layer's experts are missing
        raise WeightsError(f"{what} does not fit {type(model).__name__}: {' '.join(str(error).split())}") from error
    loaded, info = pair
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "wrong shape": sorted(str(key) for key in info["mismatched_keys"]),
    }
    if any(wrong.values()):
        said = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise WeightsError(f"{what} does not fit {type(loaded.get_decoder().layers[0]).__name__}: {said}")
    return {f"layers.{name}": value for name, value in loaded.get_decoder().layers.state_dict().items()}


def stitch(draft: DraftCheckpoint, facts: TargetFacts, out: str | Path, shape: Shape) -> tuple[str, list[str]]:
    """Write the head into a copy of the target, the new folder `out`. Returns a launch line and notes for the user.

    The ids that the head drafts are written beside it as freq_N.pt, unless it drafts all. Raises TargetError for a
    target without safetensors weights, and `ExportError` for a head that is not in the form of the target's family, a
    quantised module, an existing `out`, and when the copy does not read back as the same head; then nothing is left
    behind.
    """
    out = Path(out)
    with new_folder(out) as temporary:
        family = _family(draft, facts)
        files = tensor_names(facts)
        source = _folder(facts)
        tensors = _published(draft, family, facts)
        found = find_native(facts)
        if found is not None:
            tensors = _as_before(tensors, read_tensors(facts, found.names), facts)
        changed = {files[name] for name in tensors if name in files}
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in changed and not path.name.startswith("."):
                shutil.copyfile(path, temporary / path.name)
        for name in sorted(changed):
            _write_again(source / name, temporary / name, tensors)
        if found is None:
            _add(temporary, files, tensors, draft, family)
        notes = _notes(draft, facts, str(out.resolve()), shape)
        kept = draft.token_map
        map_file = f"freq_{kept.size}.pt" if kept.size < kept.vocab_size else None
        if map_file is not None:
            save_freq_list(temporary / map_file, kept)
            notes.append(
                f"toolkit drafts the {kept.size} ids in {map_file}; SGLang with --speculative-token-map {map_file}"
            )
        _check(draft, family, temporary, facts, tensors)
        hashes = {path.name: sha256_file(path) for path in sorted(temporary.glob("*.safetensors"))}
        untouched = sorted(set(files.values()) - changed)
        record = {
            "target": {"name": facts.name, "revision": facts.revision},
            "family": family.title,
            "trained_steps": (draft.meta.get("training") or {}).get("unroll", {}).get("ttt_steps"),
            "token_map": map_file,
            "tensors": sorted(tensors),
            "files_copied": untouched,
            "files_written": sorted(hashes.keys() - set(untouched)),
            "sha256": hashes,
        }
        write_json(temporary / STITCHED, record)
    return f"toolkit serve --target {out.resolve()}", notes


def _family(draft: DraftCheckpoint, facts: TargetFacts) -> NativeFamily:
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
def _published(draft: DraftCheckpoint, family: NativeFamily, facts: TargetFacts) -> dict[str, Tensor]:
    """The head's tensors by the family's names, experts one by one."""
    config, state = draft.head.config, draft.head.state_dict()
    assert isinstance(config, MtpConfig), "_family lets only MTP heads pass"
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
    why = _said_quantised(_quantised(before))
    if why is not None:
        raise ExportError(f"the MTP module of {facts.name} is not written: {why}")
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
    wrong = sorted(state.keys() ^ head.keys())  # in the dtype of the module that was replaced
    wrong += [name for name, one in head.items() if name in state and not torch.equal(state[name].to(one.dtype), one)]
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
