"""Parts that the formats of all other projects share: how settings are read and noted, the keys of a decoder layer, the
token map, and the content of an export.

Shapes: D draft vocabulary, V target vocabulary, A auxiliary layers, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, Resolution, dtype_of
from toolkit.checkpoint.files import SAFETENSORS
from toolkit.errors import DraftDirError, ExportError
from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts
from toolkit.tokenmap.token_map import TokenMap, as_ids
from toolkit.weights import WeightsError

log = get_logger(__name__)

Tensors = dict[str, torch.Tensor]
EMBEDDING = "embed_tokens.weight"
# Of the target; checkpoints of speculators hold copies.
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")
BY_DRAFT_ID = ("lm_head.weight", "markov_head.markov_w2.weight")  # [D, ..]: a row for each draft id
DEFAULT_THETA = 10000.0

# -- how settings are read ---------------------------------------------------------------------------------------------


class Resolver:
    """Collects resolutions. overrides: the user's values of keys (--set), which take precedence over every rule."""

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        self.lines: list[Resolution] = []
        self._overrides = dict(overrides or {})
        self._settled: set[str] = set()

    def settle(self, key: str, value: Any, rule: str, *, warning: bool = False) -> Any:
        """Notes `value` for `key`, or the user's own; returns what holds."""
        self._settled.add(key)
        if key in self._overrides:
            said = self._overrides[key]
            _check_alike(key, said, value)
            value, rule, warning = said, f"given with --set (the files say {value})", False
        self.lines.append(Resolution(key, value, rule, warning))
        return value

    def overridden(self, key: str) -> bool:
        """Whether the user gave `key` a value."""
        return key in self._overrides

    def note(self, key: str, value: Any, rule: str, *, warning: bool = False) -> None:
        """Notes what was found or left out; nothing to override."""
        self.lines.append(Resolution(key, value, rule, warning))

    def check_all_used(self) -> None:
        """Raises `DraftDirError` for an override that no rule asked for: it would be ignored silently."""
        unused = sorted(self._overrides.keys() - self._settled)
        if unused:
            raise DraftDirError(
                f"--set {unused[0]}: this checkpoint has no such setting; it has {', '.join(sorted(self._settled))}"
            )


def _check_alike(key: str, said: Any, found: Any) -> None:
    """Raises `DraftDirError` when the user's value has another type than the one it replaces."""
    if isinstance(found, tuple):
        fits = isinstance(said, tuple) and all(type(one) is int for one in said)
        wanted = "whole numbers such as 2,16,29 are"
    elif isinstance(found, bool):
        fits, wanted = isinstance(said, bool), "true or false is"
    else:
        fits, wanted = isinstance(said, int | float) and not isinstance(said, bool), "a number is"
    if not fits:
        raise DraftDirError(f"--set {key}={said}: {wanted} needed")


def log_resolutions(lines: list[Resolution]) -> None:
    """Log every resolution, warnings at that level."""
    for one in lines:
        (log.warning if one.warning else log.info)("%s", one.line)


# -- the keys of a decoder layer, read and written ---------------------------------------------------------------------

# Sizes, which are fields of HeadConfig by the same names. True: `layer_settings` cannot do without.
SIZES = {
    "hidden_size": True, "intermediate_size": True, "num_attention_heads": True, "vocab_size": True,
    "num_key_value_heads": False, "head_dim": False, "rms_norm_eps": False, "max_position_embeddings": False,
}  # fmt: skip
# Settings with the one value that the layer computes; the first two are written.
FIXED = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None, "partial_rotary_factor": 1.0}
READ = frozenset(
    """rope_parameters rope_scaling rope_theta num_hidden_layers sliding_window use_sliding_window layer_types
    attention_bias qkv_bias tie_word_embeddings draft_vocab_size target_hidden_size num_aux_hidden_states
    speculators_model_type speculators_config speculators_version transformer_layer_config""".split()
)
# Keys that transformers writes into every config.json and that do not change a draft head's arithmetic.
UNREAD = frozenset(
    """_name_or_path _attn_implementation architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range pretraining_tp
    attention_dropout hidden_dropout classifier_dropout max_window_layers tie_encoder_decoder return_dict
    output_attentions output_hidden_states is_decoder is_encoder_decoder add_cross_attention auto_map id2label label2id
    chunk_size_feed_forward cross_attention_hidden_size problem_type prefix task_specific_params finetuning_task
    tf_legacy_loss torchscript use_bfloat16 pruned_heads begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    suppress_tokens tokenizer_class bad_words_ids length_penalty no_repeat_ngram_size num_return_sequences temperature
    top_k top_p typical_p repetition_penalty remove_invalid_values max_length min_length num_beams num_beam_groups
    do_sample early_stopping diversity_penalty encoder_no_repeat_ngram_size exponential_decay_length_penalty
    output_scores return_dict_in_generate unsloth_fixed license base_model""".split()
)


def layer_settings(config: Mapping[str, Any], tensors: Tensors, prefix: str, resolver: Resolver) -> dict[str, Any]:
    """HeadConfig's fields. `prefix`: of the first layer's tensors; q_proj decides head_dim where the config is silent.

    Raises `DraftDirError` for settings that change the layer in ways the head has no part for.
    """
    lacking = [name for name, needed in SIZES.items() if needed and config.get(name) is None]
    if lacking:
        raise DraftDirError(f"config.json lacks {', '.join(lacking)}; copy the file again from its source")
    for key, value in FIXED.items():
        refuse_unless(config, key, value)
    query = f"{prefix}self_attn.q_proj.weight"
    if query not in tensors:
        raise DraftDirError(f"its weights lack {query}; a Llama-like attention with q_proj is needed")
    found, heads = {key: config.get(key) for key in SIZES}, config["num_attention_heads"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    for key, value, rule in (
        ("head_dim", tensors[query].shape[0] // heads, "not in the config: q_proj's rows over the heads"),
        ("rms_norm_eps", 1e-6, "not in the config: LlamaConfig's default"),
        ("max_position_embeddings", 2048, "not in the config: LlamaConfig's default; no limit here"),
    ):
        found[key] = resolver.settle(key, value, rule) if found[key] is None else found[key]
    return {**found, "sliding_window": _window(config, resolver), "rope_parameters": _rope(config, resolver)}


def _window(config: Mapping[str, Any], resolver: Resolver) -> int | None:
    """The sliding window of the head's attention. `sliding_window` alone is ignored: configs often copy a target's.

    Raises `DraftDirError` when layers differ in it.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types") or []
    if not window or not ("sliding_attention" in kinds if kinds else config.get("use_sliding_window")):
        return None
    if set(kinds) - {"sliding_attention"}:
        raise DraftDirError(f"config.json: layer_types {kinds} differ; a head whose layers all have a window is needed")
    return resolver.settle("sliding_window", window, f"stated by {'layer_types' if kinds else 'use_sliding_window'}")


def _rope(config: Mapping[str, Any], resolver: Resolver) -> dict[str, Any]:
    """rope_parameters as transformers 5 holds them; transformers 4 wrote rope_theta and rope_scaling."""
    stated, theta = config.get("rope_parameters"), config.get("rope_theta")
    rope = dict((stated or {}).get("full_attention", stated) or config.get("rope_scaling") or {})
    differs = bool(stated) and theta is not None and rope.get("rope_theta", theta) != theta
    rule = "the checkpoint's " + ("rope_parameters" if stated else "rope_theta")
    if differs:
        rule += f" (its older rope_theta {theta} differs and is not read)"
    if "rope_theta" not in rope:
        rope["rope_theta"] = DEFAULT_THETA if theta is None else theta
        rule = "not in the config: LlamaConfig's default" if theta is None else rule
    elif not stated and theta is not None:
        rope["rope_theta"] = theta
    rope["rope_type"] = rope.pop("type", None) if rope.get("rope_type") is None else rope["rope_type"]
    rope["rope_type"] = rope["rope_type"] or "default"
    rope.pop("type", None)
    if rope.get("mrope_section"):
        raise DraftDirError("config.json: rope has an mrope_section (a head for images); a head for text is needed")
    rope["rope_theta"] = resolver.settle("rope_theta", rope["rope_theta"], rule, warning=differs)
    if rope["rope_type"] != "default":
        resolver.note("rope_type", rope["rope_type"], f"the checkpoint's: {rope}")
    return rope


def layer_keys(config: HeadConfig, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The keys of the layers of a head of this state."""
    rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA, **config.rope_parameters}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        **{key: getattr(config, key) for key in SIZES},
        **{key: FIXED[key] for key in ("hidden_act", "mlp_bias")},
        "num_hidden_layers": config.layers,
        # transformers 4 reads the first two of these, transformers 5 the third.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype_of(state)).removeprefix("torch."),
        **config.window_keys(),
    }


def plain_rope(config: HeadConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that SafeAILab's model reads. Raises `ExportError` for a scaled rope, which it computes differently."""
    if keys["rope_scaling"] is not None:
        raise ExportError(f"the head has a scaled rope ({config.rope_parameters}), which SafeAILab's model lacks")
    return {key: value for key, value in keys.items() if key != "rope_parameters"}


def refuse_unless(config: Mapping[str, Any], key: str, value: Any) -> None:
    """Raises `DraftDirError` when `key` is stated and is not `value`."""
    stated = config.get(key)
    if stated is not None and stated != value:
        raise DraftDirError(f"config.json: {key} is {stated!r}; only {value!r} is supported")


def note_unread(config: Mapping[str, Any], own: Collection[str], resolver: Resolver) -> None:
    """Note a warning with the config keys that no rule reads: one of them may change the head's arithmetic.

    own: the keys that the format reads besides a layer's, at the top and in `eagle_config`.
    """
    known = {*READ, *UNREAD, *SIZES, *FIXED, *own}
    nested = {f"eagle_config.{key}": value for key, value in (config.get("eagle_config") or {}).items()}
    unknown = sorted(
        key
        for key, value in {**config, **nested}.items()
        if key.removeprefix("eagle_config.") not in known and value not in (None, False, [], {})
    )
    if unknown:
        rule = "no rule reads them; one that changes the arithmetic would cost accept_length (never exactness)"
        resolver.note("unknown keys", ", ".join(unknown), rule, warning=True)


# -- tensors and token maps --------------------------------------------------------------------------------------------


def renamed(
    stored: Mapping[str, torch.Tensor], our_name: Callable[[str], str], dropped: Collection[str], resolver: Resolver
) -> tuple[Tensors, torch.Tensor | None]:
    """The tensors under our names, and the embedding; without those that belong to the target, `dropped`, and what is
    computed from the config."""
    tensors: Tensors = {}
    for theirs, value in stored.items():
        ours = our_name(theirs)
        if ours in tensors:
            raise WeightsError(f"its weights hold {ours} twice, once as {theirs}; each is needed once")
        if ours in dropped or ours.endswith("rotary_emb.inv_freq"):
            resolver.note(theirs, "left out", "the target's own, or computed from the config; no part of the head")
        else:
            tensors[ours] = value
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None:
        rule = "the target's is read in its place; they must be equal, and are compared where the target is at hand"
        resolver.note(EMBEDDING, "left out", rule)
    return tensors, embedding


def count_layers(tensors: Tensors, stated: int | None) -> int:
    """The layers that the weights have by `layers.N.`. Raises `DraftDirError` where the config states others."""
    found = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if stated not in (None, found):
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {found} layers")
    return found


def target_width(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> int:
    """The target's hidden size. Raises `DraftDirError` where the head's is another."""
    width: int = config.get("target_hidden_size") or shapes["hidden_size"]
    if width != shapes["hidden_size"]:
        raise DraftDirError(
            f"config.json: the head is {shapes['hidden_size']} wide and its target {width} (target_hidden_size); such "
            "a head needs a token embedding of its own, which is not supported"
        )
    return width


def read_token_map(config: Mapping[str, Any], vocab_size: int, tensors: Tensors, resolver: Resolver) -> TokenMap:
    """d2t and t2d, taken out of `tensors`; without d2t the whole vocabulary."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab_size
        size = config.get("draft_vocab_size") or rows
        if size != vocab_size:
            raise WeightsError(f"missing: d2t. The draft vocabulary has {size} of {vocab_size} ids")
        resolver.note("d2t", "identity", "absent, and the draft vocabulary is the whole one")
        return TokenMap.identity(vocab_size)
    size = d2t.numel()
    ids = as_ids(d2t) + torch.arange(size)
    if (ids[1:] < ids[:-1]).any():
        order = ids.argsort()
        for name in [name for name in BY_DRAFT_ID if name in tensors]:
            tensors[name] = tensors[name][order.to(tensors[name].device)]
        resolver.note("d2t", "sorted", "its ids are not ascending: the rows of the output matrix were sorted with them")
    token_map = TokenMap.from_ids(ids, vocab_size)
    if t2d is None:
        empty = size < vocab_size and not d2t.any()
        rule = f"absent; d2t is all zero: ids 0..{size - 1}, or it was never filled; accept_length will show"
        resolver.note("t2d", "from d2t", rule if empty else "absent; d2t says the same", warning=empty)
    elif not torch.equal(token_map.t2d, t2d.bool()):
        raise WeightsError("d2t and t2d do not describe the same draft vocabulary; export the head again")
    return token_map


def map_tensors(draft: DraftCheckpoint) -> Tensors:
    """The token map; that of a whole vocabulary is left out, as every loader expects."""
    if draft.token_map.size == draft.token_map.vocab_size:
        return {}
    return {"d2t": draft.token_map.d2t, "t2d": draft.token_map.t2d}


def check_aux_layers(ids: tuple[int, ...], facts: TargetFacts | None) -> None:
    """Raises `DraftDirError` for ids that no target, or not this one, has."""
    if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0:
        raise DraftDirError(f"aux_layer_ids {list(ids)}: ascending, distinct ids are needed")
    if facts is not None and ids[-1] > facts.n_layers:
        raise DraftDirError(f"aux_layer_ids {list(ids)}: the target {facts.name} has {facts.n_layers} layers")


# -- the content of an export ------------------------------------------------------------------------------------------

NO_WINDOW = "there the head would attend to the whole context"
NO_BIAS = "its loader has no such bias, or also creates one for o_proj and leaves that one uninitialised"


@dataclass
class Exported:
    """The content of an export. config_of_head: the config that must be read back. added: tensors that are not the
    head's own. left_out: names of the head's tensors that are the target's, too."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    config_of_head: HeadConfig
    weights: str = SAFETENSORS
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: tuple[str, ...] = ()

    def add(self, name: str, tensor: torch.Tensor, why: str) -> None:
        """Add a tensor that is not the head's own, and a note."""
        self.tensors, self.added = {**self.tensors, name: tensor}, {**self.added, name: tensor}
        self.notes.append(f"{name} {why}")


# (head, its config as it is written, facts of the target, length of a chain) -> what is written.
Builder = Callable[[DraftCheckpoint, Any, TargetFacts, int], Exported]


def speculators_keys(algorithm: str, facts: TargetFacts, draft_tokens: int) -> dict[str, Any]:
    """The keys by which speculators and vLLM know the algorithm and its target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": facts.source, "architectures": [facts.architecture]},
        },
    }
