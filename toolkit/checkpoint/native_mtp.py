"""The MTP modules that models ship in their own checkpoints, read as draft heads of kind "mtp".

`native_families.py` says how each family names the module's parts and what they compute. The decoder layer is the
family's own class in transformers (`heads/families.py`). Every tensor under the module's names is used, or must
equal the target's (embedding, output matrix); others are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, embedding_distance, embeddings_differ
from toolkit.checkpoint.errors import DraftDirError
from toolkit.errors import TargetError
from toolkit.heads.families import OTHERS, NativeFamily, at, family_model, family_of, layer_config
from toolkit.heads.head_config import HeadError
from toolkit.heads.mtp import LLAMA_LIKE, MtpConfig, MtpHead
from toolkit.log import get_logger
from toolkit.targets.facts import (
    NATIVE_MTP_KEYS,
    TargetFacts,
    read_tensors,
    stated_config,
    target_facts,
    target_file,
    tensor_names,
)
from toolkit.targets.mtp_names import STITCHED
from toolkit.targets.target import Target
from toolkit.tokenmap.files import load_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_strict, read_json

log = get_logger(__name__)

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
        why = _said_quantised(quantised_names(tensors))
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


def quantised_names(tensors: Mapping[str, Tensor]) -> list[str]:
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
        elif embeddings_differ(embedding_distance(copied, mine.weight.detach().cpu())):
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
