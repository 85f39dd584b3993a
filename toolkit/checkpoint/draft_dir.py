"""The draft directory: a self-describing checkpoint of a draft head. `toolkit serve --draft DIR` needs nothing else.

config.json        the head's shapes in the keys that vLLM and SGLang read, and a `toolkit` block with the rest
model.safetensors  EAGLE's tensor names, d2t (offsets) and t2d (bool) among them
measured.json      what `toolkit bench` measured with it (optional)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.log import get_logger
from toolkit.models.eagle3 import Eagle3Config, Eagle3Head
from toolkit.target.load import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_strict, load_tensors, read_json, save_tensors, write_json

log = get_logger(__name__)

FORMAT = 1
ARCHITECTURE = "LlamaForCausalLMEagle3"
AUX_CONVENTION = "hidden_states: id k is the input of layer k, the output of layer k-1"


class DraftDirError(ValueError):
    """A draft directory is incomplete, damaged or does not belong to the target at hand."""


@dataclass
class DraftCheckpoint:
    """A loaded head with its token map. `meta` says where it came from (target, training, measured)."""

    head: Eagle3Head
    token_map: TokenMap
    meta: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def save_draft(
    directory: str | Path,
    head_state: Mapping[str, torch.Tensor],
    config: Eagle3Config,
    token_map: TokenMap,
    meta: Mapping[str, Any],
) -> Path:
    """Write a draft directory, over an old one too. config.json goes first and comes last, so that a directory with a
    config is complete; what was measured with other weights is removed."""
    directory = Path(directory)
    tensors = {**head_state, "d2t": token_map.d2t, "t2d": token_map.t2d}
    # Strictness belongs to the writer too: a head that cannot be read back must not be saved.
    load_strict(_empty_head(config), dict(head_state), "the head that is being saved")
    if not _same_tensors(directory / "model.safetensors", tensors):
        (directory / "measured.json").unlink(missing_ok=True)
    (directory / "config.json").unlink(missing_ok=True)
    save_tensors(directory / "model.safetensors", tensors)
    write_json(
        directory / "config.json", {**_serving_keys(config, head_state), "toolkit": _toolkit_block(config, meta)}
    )
    return directory


def _same_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    try:
        stored = load_tensors(path)
    except WeightsError:
        return False
    return stored.keys() == tensors.keys() and all(
        stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor.cpu())
        for name, tensor in tensors.items()
    )


def _toolkit_block(config: Eagle3Config, meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "head": "eagle3",
        "aux_layer_ids": list(config.aux_layer_ids),
        "aux_layer_ids_convention": AUX_CONVENTION,
        **meta,
    }


def _serving_keys(config: Eagle3Config, head_state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The keys that vLLM's and SGLang's EAGLE-3 loaders read."""
    values = {name: value for name, value in config.to_dict().items() if name != "aux_layer_ids"}
    rope = config.rope_parameters
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **values,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "dtype": str(head_state["fc.weight"].dtype).removeprefix("torch."),
    }


def load_draft(directory: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> DraftCheckpoint:
    """Read a draft directory strictly.

    dtype None keeps the stored one. Raises `DraftDirError` when files or keys are absent, `WeightsError` when tensors
    are missing, unexpected, wrongly shaped or the file is cut short.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise DraftDirError(
            f"{directory} is no draft directory: it has no config.json. A directory that `toolkit train` or "
            "`toolkit run` wrote (runs/NAME/ckpt) is needed"
        )
    stored = read_json(directory / "config.json")
    config = _config_from(stored, directory)
    tensors = load_tensors(directory / "model.safetensors")
    token_map = _token_map_from(tensors, config, directory)
    head = _empty_head(config)
    weights = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    load_strict(head, weights, str(directory / "model.safetensors"))
    head = head.to(device=device, dtype=dtype or weights["fc.weight"].dtype).eval().requires_grad_(False)
    meta = dict(stored["toolkit"])
    if (directory / "measured.json").is_file():
        meta["measured"] = read_json(directory / "measured.json")
    return DraftCheckpoint(head=head, token_map=token_map, meta=meta, path=directory)


def _config_from(stored: Any, directory: Path) -> Eagle3Config:
    if not isinstance(stored, dict) or "toolkit" not in stored:
        raise DraftDirError(
            f"{directory}/config.json has no `toolkit` block, so it was not written by this project and its aux-layer "
            "convention is unknown; train the head here"
        )
    block = stored["toolkit"]
    if block.get("format") != FORMAT or block.get("head") != "eagle3":
        raise DraftDirError(
            f"{directory}/config.json holds format {block.get('format')!r}, head {block.get('head')!r}; "
            f"this version reads format {FORMAT}, head 'eagle3'"
        )
    values = {**stored, "aux_layer_ids": block.get("aux_layer_ids")}
    wanted = list(Eagle3Config.__dataclass_fields__)
    missing = [name for name in wanted if values.get(name) is None]
    if missing:
        raise DraftDirError(f"{directory}/config.json lacks {', '.join(missing)}; copy the file again from its source")
    return Eagle3Config.from_dict({name: values[name] for name in wanted})


def _token_map_from(tensors: dict[str, torch.Tensor], config: Eagle3Config, directory: Path) -> TokenMap:
    absent = [name for name in ("d2t", "t2d") if name not in tensors]
    if absent:
        raise WeightsError(
            f"{directory}/model.safetensors lacks {', '.join(absent)}: the token map of the draft vocabulary"
        )
    token_map = TokenMap.from_d2t(tensors["d2t"], config.vocab_size)
    if token_map.size != config.draft_vocab_size or not torch.equal(token_map.t2d, tensors["t2d"].bool()):
        raise WeightsError(
            f"{directory}/model.safetensors: d2t ({token_map.size} ids) and t2d ({int(tensors['t2d'].sum())} ids) and "
            f"draft_vocab_size {config.draft_vocab_size} do not describe the same token map"
        )
    return token_map


def _empty_head(config: Eagle3Config) -> Eagle3Head:
    """A head whose weights are all to be loaded: NaN, so that a forgotten one is loud."""
    head = Eagle3Head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(float("nan"))
    return head


def check_draft_matches(draft: DraftCheckpoint, target: Target) -> None:
    """Raise `DraftDirError` if the head cannot work on `target`; warn when it was trained on another one."""
    config = draft.head.config
    wrong = [
        f"{what} {have} (the target's is {need})"
        for what, have, need in (
            ("target_hidden_size", config.target_hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
        )
        if have != need
    ]
    if config.aux_layer_ids[-1] > target.n_layers:
        wrong.append(f"aux_layer_ids {list(config.aux_layer_ids)} (the target has {target.n_layers} layers)")
    if wrong:
        raise DraftDirError(
            f"the draft head {draft.path or ''} does not fit the target {target.name}: {'; '.join(wrong)}. "
            "Serve it with the target it was trained for"
        )
    trained_for = draft.meta.get("target", {})
    if trained_for.get("fingerprint") not in (None, target.fingerprint):
        log.warning(
            "the head was trained for %s, not %s: output stays exact, but accept_length may fall",
            trained_for.get("name"),
            target.name,
        )
    if trained_for.get("template_sha256") not in (None, target.template_sha256):
        log.warning("the target's chat template is not the one the head was trained with: accept_length may fall")
