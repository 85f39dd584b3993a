"""One reader and one writer for the checkpoints of other projects. A format (`eagle3_format.py`, ..) is a table of keys
and names, which they walk, and functions for what depends on several of them.

Shapes: D draft vocabulary, V target vocabulary, A auxiliary layers, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, Resolution, dtype_of
from toolkit.checkpoint.files import SAFETENSORS, plain_name
from toolkit.errors import DraftDirError, ExportError
from toolkit.heads.head_config import AuxHeadConfig, HeadConfig
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts
from toolkit.targets.features import check_aux_layer_ids
from toolkit.tokenmap.token_map import TokenMap, as_ids
from toolkit.weights import WeightsError

log = get_logger(__name__)

Tensors = dict[str, torch.Tensor]
EMBEDDING = "embed_tokens.weight"
# Of the target; checkpoints of speculators hold copies.
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")
# What is added to the ids of auxiliary layers to reach ours -> who writes them so.
MEANT = {
    0: "speculators and vLLM mean it: id k is the input of layer k",
    1: "SGLang, SpecForge and ModelOpt mean it: outputs, plus 1",
}
BY_DRAFT_ID = ("lm_head.weight", "markov_head.markov_w2.weight")  # [D, ..]: a row for each draft id
DEFAULT_THETA = 10000.0

# -- what a format states ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How other projects write one kind of head.

    config: the class of its configuration. first_layer: what the names of its first layer's tensors begin with.
    variants: the kind's own fields, from all that is read.
    names: beginnings of tensor names, theirs -> ours. dropped: tensors that are the target's.
    nested: mappings in config.json whose keys may as well stand at its top. fixed: keys with the one value that the
    head computes. keys: further keys that are read. by_tensor: fields that a tensor shows, with the keys that state
    them. aux: keys of the auxiliary layers, and what is added to reach ours; one that means another thing inside of a
    nested mapping has that mapping's name before it. usual_aux: without such a key every engine takes EAGLE's layers.
    writers: by the engine, what completes an export. refused: by the engine, fields that its loader has no place for,
    and what it would do instead. why_not: of engines without a writer.
    """

    config: type[HeadConfig]
    first_layer: str
    variants: Callable[[Reading], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    dropped: Collection[str] = TARGETS_OWN
    nested: Collection[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Collection[str] = ()
    by_tensor: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    aux: Mapping[str, int] = field(default_factory=dict)
    usual_aux: bool = False
    writers: Mapping[str, Writer] = field(default_factory=dict)
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    why_not: str = "no such loader"


class Reading:
    """A checkpoint that is being read. said: its settings, with the nested ones. layer: those of the decoder layers.
    shapes: HeadConfig's fields, of `layer_settings`. tensors: by our names. embedding: the one that came with it."""

    def __init__(
        self,
        form: Format,
        config: Mapping[str, Any],
        stored: Mapping[str, torch.Tensor],
        resolver: Resolver,
        facts: TargetFacts | None,
    ) -> None:
        self.resolver, self.facts = resolver, facts
        self.speculators = "transformer_layer_config" in config
        self.said = _flat(form, config)
        self.layer = dict(config["transformer_layer_config"]) if self.speculators else self.said
        for key, value in form.fixed.items():
            refuse_unless({**self.said, **self.layer}, key, value)
        self.tensors, self.embedding = _renamed(form, stored, resolver)
        self.shapes = layer_settings(self.layer, self.tensors, form.first_layer, resolver)


def read_foreign(
    form: Format,
    config: Mapping[str, Any],
    stored: Mapping[str, torch.Tensor],
    resolver: Resolver,
    facts: TargetFacts | None,
) -> tuple[HeadConfig, Tensors, TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, its token map (of all ids where it has none), and the embedding that came with the
    checkpoint (None without one).

    config: its config.json. stored: its tensors. `facts` of the target are needed only where the checkpoint does not
    state its auxiliary layers. Raises `DraftDirError`, `WeightsError`, `TokenMapError`.
    """
    reading = Reading(form, config, stored, resolver, facts)
    said, layer, shapes, tensors = reading.said, reading.layer, reading.shapes, reading.tensors
    own = form.variants(reading)
    token_map = TokenMap.identity(shapes["vocab_size"])
    if issubclass(form.config, AuxHeadConfig):
        token_map = _token_map(said, shapes["vocab_size"], tensors, resolver)
        own |= {
            "target_hidden_size": _target_width(said, shapes),
            "draft_vocab_size": token_map.size,
            "aux_layer_ids": _aux_layer_ids(form, said, resolver, facts),
        }
    own["num_hidden_layers"] = _layers(stored, tensors, layer.get("num_hidden_layers"), resolver)
    keys = {key for _, keys in form.by_tensor.values() for key in keys}
    _note_unread({**layer, **said}, {*form.keys, *form.fixed, *form.aux, *keys}, resolver)
    return form.config(**shapes, **_by_tensor(form, reading), **own), tensors, token_map, reading.embedding


def _flat(form: Format, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the nested ones. Raises `DraftDirError` where two differ."""
    flat = {key: value for key, value in config.items() if key not in form.nested}
    for place in form.nested:
        for key, value in (config.get(place) or {}).items():
            if f"{place}.{key}" in form.aux:
                key = f"{place}.{key}"
            elif flat.get(key) is not None and value is not None and flat[key] != value:
                raise DraftDirError(f"config.json: {key} is {flat[key]}, and in {place} {value}; leave one out")
            flat[key] = value if flat.get(key) is None else flat[key]
    return flat


def _by_tensor(form: Format, reading: Reading) -> dict[str, Any]:
    """The fields that tensors show. Raises `WeightsError` for a norm that the config states and the weights lack."""
    found: dict[str, Any] = {}
    for name, (tensor, keys) in form.by_tensor.items():
        stated = [bool(reading.said[key]) for key in keys if reading.said.get(key) is not None]
        usual = any(stated) if stated else bool(getattr(form.config, name))
        found[name] = tensor in reading.tensors
        if found[name]:
            lost = bool(keys) and not usual
            rule = f"the checkpoint has {tensor}"
            rule += f", though its config does not set {keys[0]}: other engines would leave it out" if lost else ""
            reading.resolver.note(name, True, rule, warning=lost)
        elif any(stated) and not tensor.endswith("bias"):
            raise WeightsError(f"missing: {tensor}. The config sets {name}")
        elif any(stated):
            reading.resolver.note(name, False, f"the config sets {name}, but there is no {tensor}", warning=True)
    return found


# -- how settings are read ---------------------------------------------------------------------------------------------

KINDS = {tuple: "whole numbers such as 2,16,29 are", bool: "true or false is", int: "a number is", float: "a number is"}


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
            numbers = all(type(one) is int for one in said) if isinstance(said, tuple) else True
            if KINDS.get(type(said)) != KINDS[type(value)] or not numbers:
                raise DraftDirError(f"--set {key}={said}: {KINDS[type(value)]} needed")
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
        raise DraftDirError(
            f"config.json: layer_types {kinds} differ; a sliding window of all layers or of none is needed"
        )
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
    window: dict[str, Any] = {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    if window:  # vLLM and speculators apply it according to `layer_types`
        window["layer_types"] = ["sliding_attention"] * config.layers
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
        **window,
    }


def plain_rope(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that SafeAILab's model reads. Raises `ExportError` for a scaled rope, which it computes differently."""
    if keys["rope_scaling"] is not None:
        raise ExportError(f"the head has a scaled rope ({keys['rope_parameters']}), which SafeAILab's model lacks")
    return {key: value for key, value in keys.items() if key != "rope_parameters"}


def refuse_unless(config: Mapping[str, Any], key: str, value: Any) -> None:
    """Raises `DraftDirError` when `key` is stated and is not `value`."""
    stated = config.get(key)
    if stated is not None and stated != value:
        raise DraftDirError(f"config.json: {key} is {stated!r}; only {value!r} is supported")


def _note_unread(config: Mapping[str, Any], own: Collection[str], resolver: Resolver) -> None:
    """Note a warning with the config keys that no rule reads: one of them may change the head's arithmetic.

    own: the keys that the format reads besides a layer's.
    """
    known = {*READ, *UNREAD, *SIZES, *FIXED, *own}
    unknown = sorted(key for key, value in config.items() if key not in known and value not in (None, False, [], {}))
    if unknown:
        rule = "no rule reads them; one that changes the arithmetic would cost accept_length (never exactness)"
        resolver.note("unknown keys", ", ".join(unknown), rule, warning=True)


# -- tensors, layers and token maps ------------------------------------------------------------------------------------


def _renamed(
    form: Format, stored: Mapping[str, torch.Tensor], resolver: Resolver
) -> tuple[Tensors, torch.Tensor | None]:
    """The tensors under our names, and the embedding; without those that belong to the target and what is computed from
    the config."""
    tensors: Tensors = {}
    for theirs, value in stored.items():
        ours = plain_name(theirs)
        begin = next((one for one in form.names if ours.startswith(one)), "")
        ours = form.names.get(begin, "") + ours.removeprefix(begin)
        if ours in tensors:
            raise WeightsError(f"its weights hold {ours} twice, once as {theirs}; each is needed once")
        if ours in form.dropped or ours.endswith("rotary_emb.inv_freq"):
            resolver.note(theirs, "left out", "the target's own, or computed from the config; no part of the head")
        else:
            tensors[ours] = value
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None:
        rule = "the target's is read in its place; they must be equal, and are compared where the target is at hand"
        resolver.note(EMBEDDING, "left out", rule)
    return tensors, embedding


def _layers(stored: Collection[str], tensors: Tensors, stated: int | None, resolver: Resolver) -> int:
    """Decoder layers, by the weights. Raises `DraftDirError` where the config states others and may be right."""
    found = len({".".join(name.split(".")[:2]) for name in tensors if name.startswith("layers.")})
    found += any(name.startswith("midlayer.") for name in tensors)
    if stated in (None, found):
        return found
    if found > 1 or not any("midlayer." in name for name in stored):
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {found}")
    rule = f"a head with a midlayer and no layers.1 has one layer; the config's {stated} (its target's?) is not read"
    resolver.note("num_hidden_layers", found, rule, warning=True)
    return found


def _target_width(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> int:
    """The target's hidden size. Raises `DraftDirError` where the head's is another."""
    width: int = config.get("target_hidden_size") or shapes["hidden_size"]
    if width != shapes["hidden_size"]:
        raise DraftDirError(
            f"config.json: the head is {shapes['hidden_size']} wide and its target {width} (target_hidden_size); such "
            "a head needs a token embedding of its own, which is not supported"
        )
    return width


def _token_map(config: Mapping[str, Any], vocab_size: int, tensors: Tensors, resolver: Resolver) -> TokenMap:
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


def _map_tensors(draft: DraftCheckpoint) -> Tensors:
    """The token map; that of a whole vocabulary is left out, as every loader expects."""
    if draft.token_map.size == draft.token_map.vocab_size:
        return {}
    return {"d2t": draft.token_map.d2t, "t2d": draft.token_map.t2d}


def _aux_layer_ids(
    form: Format, said: Mapping[str, Any], resolver: Resolver, facts: TargetFacts | None
) -> tuple[int, ...]:
    """As indices into HF hidden_states, our convention (id k = input of layer k).

    Raises `DraftDirError` for keys that differ, `TargetError` for ids that no target, or not this one, has."""
    found = {key: tuple(i + by for i in said[key]) for key, by in form.aux.items() if said.get(key)}
    usual = (2, facts.n_layers // 2, facts.n_layers - 3) if form.usual_aux and facts is not None else ()
    given = resolver.overridden("aux_layer_ids")
    if len(set(found.values())) > 1 and not given:
        stated = " and ".join(f"{key} {list(said[key])} ({'outputs' if form.aux[key] else 'inputs'})" for key in found)
        raise DraftDirError(
            f"config.json states {stated}, which are different layers; give the right ones with --set "
            "aux_layer_ids=a,b,c (id k = input of layer k)"
        )
    if not found and not usual and not given:
        remedy = "and the usual (2, n//2, n-3) depend on the target: name it with `target`"
        remedy = remedy if form.usual_aux else "give them with --set aux_layer_ids=a,b,c (id k = input of layer k)"
        raise DraftDirError(f"config.json states no layers of the target ({', '.join(form.aux)}), {remedy}")
    ids, rule = usual, "not stated: (2, n//2, n-3), which every engine takes then"
    for key, read in list(found.items())[:1]:
        ids = read
        rule = f"{key} {list(said[key])}, as {MEANT[form.aux[key]]}"
    shifted = bool(usual) and usual in [tuple(i + by for i in ids) for by in (-1, 1)]
    if shifted:
        shown = ",".join(map(str, usual))
        rule += f". This target's usual ones are {shown}: these look off by one; try --set aux_layer_ids={shown}"
    ids = tuple(resolver.settle("aux_layer_ids", ids, rule, warning=shifted))
    check_aux_layer_ids(ids, facts.n_layers if facts is not None else max(ids, default=0))
    return ids


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


# Completes an export: (what is written so far, facts of the target, length of a chain).
Writer = Callable[[Exported, TargetFacts, int], None]


def write_foreign(form: Format, draft: DraftCheckpoint, to: str, facts: TargetFacts, draft_tokens: int) -> Exported:
    """`draft` for the engine `to`. draft_tokens: a chain's length, where the format holds one.

    Raises `ExportError` for a head that the engine would not draft with as it is."""
    config, state = draft.head.config, draft.head.state_dict()
    notes: list[str] = []
    own, wanted = config.max_position_embeddings, facts.max_context or 0
    if own < wanted and config.rope_parameters.get("rope_type", "default") == "default":
        config = replace(config, max_position_embeddings=wanted)
        notes.append(
            f"max_position_embeddings {own} is written as the target's {wanted}: vLLM computes no rotation beyond it, "
            "and at each position the rotation stays the same"
        )
    for key, why in form.refused.get(to, {}).items():
        value = getattr(config, key)
        if value is True or value not in (None, False, 1):
            said = key if value is True else f"{key} {value}"
            raise ExportError(f"the head has {said}, which cannot be written for {to}: {why}")
    made = Exported(layer_keys(config, state), state | _map_tensors(draft), config, notes=notes)
    form.writers[to](made, facts, draft_tokens)
    return made


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
