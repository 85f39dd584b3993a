"""`toolkit check`: whether a draft head belongs to its target, drafts as it was measured and decodes without loss.

Target and head are loaded in float32, in which speculative decoding must write the tokens of plain decoding. The
measurement of a run keeps what this page compares with: `reference`, as "check" in measured.json.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.bench.bootstrap import LEAST_GROUPS, resampled_interval
from toolkit.bench.near_tie import find_divergence, logit_noise, plain_logits
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError, check_draft_fits, rope_difference
from toolkit.checkpoint.files import locate
from toolkit.data.chat_template import encode, prompt_ids
from toolkit.errors import TargetError
from toolkit.heads.head_config import full_attention_rope
from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.drafters.choose_drafter import default_shape, drafts_at_once
from toolkit.infer.engine.config import NATIVE, NGRAM, NONE, ConfigError, EngineConfig
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import find_module, load_draft, native_draft, with_target, with_token_map
from toolkit.infer.load.load_engine import device_of
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.jsonl import DataError
from toolkit.targets.features import check_aux_layer_ids
from toolkit.targets.load import full_name
from toolkit.targets.target import Target
from toolkit.tokenmap.build import forced_ids_for
from toolkit.tokenmap.token_map import TokenMapError
from toolkit.weights import WeightsError, sha256_json

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
PROMPTS, MAX_TOKENS = 16, 32  # the same for every head, so that any check can be compared with any measurement
TREE = DraftShape(4, 4, 16)  # the tree that `toolkit bench` measures
LEAST_COVERAGE = 0.5  # of the answers' tokens; maps of N of V random ids cover N/V of them
LEAST_LENGTH = 1.05  # accept_length of a head that says anything; below it every comparison is of noise
SLACK = 0.02  # of accept_length: rounding on another machine may turn a near-tie between two drafts
SHOWN = 3  # changed tensors that are named
# Draws: the first WRITTEN tokens after a prompt, each from the WIDTH most probable ones, DRAWS times.
WRITTEN, WIDTH, DRAWS, LEAST = 3, 4, 1000, 10
SAMPLING_ALARM = 1e-6  # chance that an exact engine fails a test
BATCH = 64
TRIED = 4  # prompts, of which the one with the most even distribution is taken
LEAST_GAP = 10.0  # between the last logit kept and the first one cut, in units of float32's rounding


class Finding(NamedTuple):
    """The result of one check: OK, FAILED or SKIPPED, one line that says why, and its numbers for the record."""

    status: str
    detail: str
    numbers: Mapping[str, Any] = {}


class Continuations(NamedTuple):
    """The exact distribution of continuations of a prompt: probabilities [WIDTH ** WRITTEN] fp64 by the tokens written.

    gap: the least distance between the last logit kept and the first one cut, in units of float32's rounding.
    """

    prompt: list[int]
    probabilities: dict[tuple[int, ...], float]
    gap: float

    @property
    def entropy(self) -> float:
        values = torch.tensor(list(self.probabilities.values()), dtype=torch.float64)
        return float(torch.special.entr(values).sum())


@dataclass
class CheckedHead:
    """A head and its target, both in float32 on one device. Texts are decoded once, when a check first needs them.

    tensors: by name a part of the sha256 of each tensor of the head, in float32.
    """

    draft: DraftCheckpoint
    target: Target
    prompts: Sequence[list[int]]
    tensors: Mapping[str, str]

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """The `reference` of the measurement; None if the head was not measured by a run."""
        found: Mapping[str, Any] | None = (self.draft.meta.get("measured") or {}).get("check")
        return found

    @cached_property
    def chain(self) -> DraftShape:
        return DraftShape.chain(3) if "native" in self.draft.meta else default_shape(self.draft)

    @cached_property
    def tree(self) -> DraftShape | None:
        """None: the target verifies no trees, or the head drafts none."""
        most = drafts_at_once(self.draft)
        shape = TREE.up_to(most) if most else TREE
        try:
            Engine(self.target, self.draft, shape, disable_cuda_graph=True).close()
        except DraftShapeError:
            return None
        return shape

    def decode(
        self, asked: Sequence[tuple[int, DraftShape | None]], batch: int, draft: DraftCheckpoint | None = None
    ) -> list[Request]:
        """Greedy answers to prompts by their place, each with its shape (None: plain), `batch` at once."""
        shapes = [shape for _, shape in asked if shape is not None]
        models = (draft or self.draft, DraftShape.covering(shapes)) if shapes else (None, None)
        engine = Engine(self.target, *models, max_running_requests=batch, disable_cuda_graph=True)
        params = SamplingParams(max_tokens=MAX_TOKENS)
        requests = [
            engine.add_request(self.prompts[at], params, speculative=shape is not None, shape=shape)
            for at, shape in asked
        ]
        while engine.has_work():
            engine.step()
        engine.close()
        return requests

    def with_chain(self, draft: DraftCheckpoint | None = None) -> list[Request]:
        """The answers to all prompts with the chain, in one batch."""
        return self.decode([(at, self.chain) for at in range(len(self.prompts))], len(self.prompts), draft)

    @cached_property
    def drafted(self) -> list[Request]:
        return self.with_chain()

    @cached_property
    def plain(self) -> list[list[int]]:
        """The greedy answer of plain decoding to each prompt."""
        every = [(at, None) for at in range(len(self.prompts))]
        return [list(request.output_ids) for request in self.decode(every, len(every))]

    @cached_property
    def reference(self) -> dict[str, Any]:
        """What a later check of this head compares with.

        answers: by the hash of a prompt: the hash of plain decoding's answer, verify steps, accepted drafts.
        """
        counts = zip(self.prompts, self.plain, map(_counts, self.drafted), strict=True)
        return {
            "shape": self.chain.as_text(),
            "settings": self.draft.head.config.to_dict() | {"token map": self.draft.token_map.sha256},
            "tensors": dict(self.tensors),
            "answers": {_short_hash(prompt): [_short_hash(answer), *own] for prompt, answer, own in counts},
        }

    @cached_property
    def continuations(self) -> Continuations | None:
        """The exact distribution that sampled continuations of a prompt are compared with."""
        return most_even_distribution(self.target, self.prompts, self.draft.head.config.mtp_layers)


def _short_hash(value: Any) -> str:
    return sha256_json(value)[:16]


def _counts(request: Request) -> tuple[int, int]:
    """Verify steps and accepted drafts of an answer."""
    stats = summarise(request.events)
    return stats.verify_steps, stats.accepted


def _length(counts: Sequence[Sequence[int]]) -> float:
    """accept_length over answers of (verify steps, accepted drafts)."""
    steps, accepted = (sum(each) for each in zip(*counts, strict=True))
    return 1 + accepted / max(1, steps)


class MisfitError(ValueError):
    """A head that cannot draft on its target, by its sizes, embedding or layers."""


def open_checked(config: EngineConfig) -> CheckedHead:
    """Load the head and the target of `config` in float32, and render the built-in prompts that fit its context.

    Raises `ConfigError` without a head, `DraftDirError`, `WeightsError` or `TokenMapError` for one that cannot be read
    or holds values that are not finite, `MisfitError`, and `TargetError`.
    """
    name = str(config.draft)
    if config.draft is None or name in (NGRAM, NONE):
        given = "not given" if config.draft is None else name
        raise ConfigError(f"`draft` is {given}; a head is needed: a draft directory, a hub id, or native")
    device = device_of(config)
    config.check(device.type)
    draft: Any = None if name == NATIVE else load_draft(name, config.target, config.revision)
    config = with_target(config, draft)
    module = find_module(config) if draft is None else None
    target = load_target(str(config.target), dtype="float32", device=device, **config.target_options)
    draft = draft if module is None else native_draft(config, target, *module)
    assert isinstance(draft, DraftCheckpoint), "a head is checked"
    if config.token_map is not None:
        draft = with_token_map(draft, target, config.token_map)
        # This map is the user's choice, and nothing was measured with it.
        draft = replace(draft, meta={**draft.meta, "token_map_sha256": None, "measured": None})
    draft.head.cast(target.device, target.dtype)
    state = {name: value.cpu().contiguous() for name, value in draft.head.state_dict().items()}
    if broken := [name for name, value in state.items() if not value.isfinite().all()]:
        raise WeightsError(f"values of {', '.join(broken)} are not finite")
    tensors = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16] for name, value in state.items()}
    pack(target, draft, draft_quantization="none")  # packed weights can be neither read nor compared
    ids = draft.head.config.features.aux_layer_ids
    try:
        if ids is not None:
            check_aux_layer_ids(ids, target.n_layers)
        check_draft_fits(draft, target)
    except (TargetError, DraftDirError) as error:
        raise MisfitError(str(error)) from error
    return CheckedHead(draft, target, _prompts(target), tensors)


def _prompts(target: Target) -> list[list[int]]:
    """The ids of the first turns of PROMPTS built-in prompts, evenly over tasks, of those that the context holds."""
    tokenizer, chats = target.tokenizer, bool(target.template_sha256)
    texts = [prompt.turns[0] for prompt in limited(builtin_prompts(), PROMPTS)]
    found = [
        prompt_ids(tokenizer, [{"role": "user", "content": text}]) if chats else encode(tokenizer, text)
        for text in texts
    ]
    fitting = [ids for ids in found if len(ids) + MAX_TOKENS <= target.max_context]
    if not fitting:
        raise DataError(
            f"no built-in prompt and {MAX_TOKENS} tokens fit into the target's context of {target.max_context}"
        )
    return fitting


FAILED_LOAD: Mapping[type[ValueError], str] = {TokenMapError: "token map", MisfitError: "target"}


def findings(config: EngineConfig, *, quick: bool = False) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order; yield each finding with the name of its check. quick: without sampled draws.

    Nothing follows on a head that cannot draft, and a check whose outcome an earlier failure explains is skipped, so
    the page names one cause. Raises `ConfigError`, and
    `DraftDirError` or `TargetError` for a head or target that is not found.
    """
    if config.draft is not None and str(config.draft) not in (NATIVE, NGRAM, NONE):
        locate(str(config.draft))
    try:
        head = open_checked(config)
    except (WeightsError, TokenMapError, DraftDirError, MisfitError) as error:
        yield FAILED_LOAD.get(type(error), "weights"), Finding(FAILED, str(error))
        return
    failed: list[str] = []
    stated = (("weights", weights_check), ("target", target_check), ("template", template_check))
    for name, check in (*stated, ("rope", rope_check), ("token map", token_map_check)):
        found = check(head)
        failed += [name] if found.status == FAILED else []
        yield name, found
    yield "greedy", greedy_check(head)
    yield "acceptance", acceptance_check(head, failed)
    for verify in () if quick else ("target", "rejection", "block"):
        yield f"sampling, {verify}", sampling_check(head, verify)


# -- what the files state ----------------------------------------------------------------------------------------------


def weights_check(head: CheckedHead) -> Finding:
    """They were loaded strictly; every value is finite: see `open_checked`."""
    of = f"{head.draft.kind}; the target is {head.target.name} ({head.target.precision}; on {head.target.device})"
    return Finding(OK, f"{len(head.tensors)} finite tensors of a head of kind {of}")


def target_check(head: CheckedHead) -> Finding:
    """The head fits it, and was trained for it by name, revision and configuration."""
    target, stated = head.target, head.draft.meta.get("target") or {}
    name, revision, fingerprint = (stated.get(key) for key in ("name", "revision", "fingerprint"))
    given, named = _with_revision(target.name, target.revision), _with_revision(str(name), revision)
    if "native" in head.draft.meta:
        return Finding(OK, f"the module is part of {given}")
    if not name:
        return Finding(SKIPPED, f"the head names no target; its sizes are those of {given}")
    same_name = full_name(name) == full_name(target.name)
    local = any(Path(one).expanduser().exists() for one in (name, target.name))
    if fingerprint is not None and fingerprint != target.fingerprint_as(name, revision):
        return Finding(FAILED, f"the head was trained for {named} with another configuration than that of {given}")
    if same_name and (None in (revision, target.revision) or revision == target.revision):
        return Finding(OK, f"{given}, as recorded")
    if same_name or not local:
        return Finding(FAILED, f"the head was trained for {named}, and the target is {given}")
    if fingerprint is None:
        return Finding(SKIPPED, f"the head names {named}, the target is {given}; no fingerprint tells if they are one")
    return Finding(OK, f"{given} has the configuration of {named}, for which the head was trained")


def _with_revision(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name}@{revision}"


def template_check(head: CheckedHead) -> Finding:
    """The chat template is the one of the training's texts, by its hash."""
    recorded, mine = (head.draft.meta.get("target") or {}).get("template_sha256"), head.target.template_sha256
    if recorded is None:
        return Finding(SKIPPED, "the head records no hash of a template")
    shown = [f"sha256 {one[:12]}" if one else "none" for one in (recorded, mine)]
    if recorded != mine:
        return Finding(FAILED, f"the head was trained with the template {shown[0]}, the target's is {shown[1]}")
    return Finding(OK, f"{shown[0]}, as recorded")


def rope_check(head: CheckedHead) -> Finding:
    """The head rotates as the target does. Every kind of ours copies the target's settings; others may differ."""
    config = head.draft.head.config
    difference = rope_difference(config, full_attention_rope(head.target.config))
    if difference is None:
        return Finding(OK, ", ".join(f"{key} {value}" for key, value in config.rope_parameters.items()))
    return Finding(SKIPPED if "writer" in head.draft.meta else FAILED, difference)


def token_map_check(head: CheckedHead) -> Finding:
    """The map is that of the training or measurement by its hash. Without a hash, coverage finds random ids only: the
    map of another tokenizer of the same size covered 0.89 of the demo target's tokens, its own 0.93."""
    token_map, target, meta = head.draft.token_map, head.target, head.draft.meta
    if not head.draft.head.config.own_vocabulary and token_map.size == token_map.vocab_size:
        return Finding(SKIPPED, f"the head drafts all {token_map.size:,} ids by the target's output matrix")
    recorded = meta.get("token_map_sha256") or (head.measured or {}).get("settings", {}).get("token map")
    if token_map.vocab_size != target.vocab_size:
        return Finding(FAILED, f"is over {token_map.vocab_size:,} ids, the target has {target.vocab_size:,}")
    if recorded not in (None, token_map.sha256):
        return Finding(FAILED, f"is {token_map.sha256[:12]}, and the head was made with {recorded[:12]} (sha256)")
    if not token_map.t2d[sorted(target.stop_ids)].any():
        return Finding(FAILED, f"holds none of the ids that end an answer ({sorted(target.stop_ids)})")
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    absent = int((~token_map.t2d[list(forced)]).sum())
    written = torch.tensor([token for answer in head.plain for token in answer])
    covered = float(token_map.t2d[written].float().mean())
    says = f"{token_map.size:,} of {token_map.vocab_size:,} ids, {absent or 'no'} special ids absent, "
    says += f"covers {covered:.1%} of {len(written)} tokens"
    if recorded or "token_map_sha256" in meta:
        return Finding(OK, f"{says}{', sha256 as recorded' if recorded else ''}")
    if covered < LEAST_COVERAGE and token_map.size < LEAST_COVERAGE * token_map.vocab_size:
        return Finding(FAILED, f"{says}; the map of a target covers {LEAST_COVERAGE:.0%} at least: it is another's")
    return Finding(SKIPPED, f"{says}; no hash is recorded, so nothing tells whose map it is")


# -- what decoding shows -----------------------------------------------------------------------------------------------


def greedy_check(head: CheckedHead) -> Finding:
    """Speculative decoding writes plain decoding's tokens: the chain in a batch, half of the prompts in a batch of
    trees, chains and plain rows, and some alone."""
    every, shapes = range(len(head.prompts)), [one for one in (head.chain, head.tree) if one is not None]
    mixed = list(zip(every[::2], cycle((*reversed(shapes), None))))
    alone = list(zip(every[::8], cycle(shapes)))
    asked = [(at, head.chain) for at in every] + mixed + alone
    requests = [*head.drafted, *head.decode(mixed, len(mixed)), *head.decode(alone, 1)]
    wrong, ties = [], 0
    for (at, shape), request in zip(asked, requests, strict=True):
        logits = partial(_logits_after, head.target, head.prompts[at])
        found = find_divergence(head.plain[at], request.output_ids, logits, head.target.dtype)
        if found is None or found.near_tie:
            ties += found is not None
            continue
        first = f"one answer ends at token {found.position}, the other goes on"
        if found.plain_logit is not None:
            first = (
                f"token {found.position} is {found.speculative_token} (logit {found.speculative_logit:.4f}), plain "
                f"decoding's is {found.plain_token} (logit {found.plain_logit:.4f})"
            )
        wrong.append(f"prompt {at}, {'plain' if shape is None else shape.name}: {first}")
    numbers = {"answers": len(asked), "near_ties": ties, "unequal": len(wrong)}
    if wrong:
        says = f"{len(wrong)} of {len(asked)} answers differ from plain decoding's; first: {wrong[0]}"
        return Finding(FAILED, says, numbers)
    names = " and ".join(one.name for one in shapes) + ("" if head.tree else " (target or head take no tree)")
    more = f", {ties} first part at a near-tie of float32" if ties else ""
    says = f"{len(asked) - ties} of {len(asked)} answers equal plain decoding's{more}: {names}, alone and in a batch"
    return Finding(OK, says, numbers)


def _logits_after(target: Target, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    return plain_logits(target, [*prompt, *written])


def acceptance_check(head: CheckedHead, failed: Sequence[str]) -> Finding:
    """The chain's accept_length is that of the measurement, on the same prompts and answers: what was changed since is
    the cause if it is not. failed: earlier checks, which would be the cause."""
    own = _length([_counts(one) for one in head.drafted])
    numbers: dict[str, Any] = {"shape": head.chain.as_text(), "accept_length": own}
    says = f"{head.chain.name}: accept_length {own:.2f}"
    if failed:
        return Finding(SKIPPED, f"{says}; not compared, as {failed[0]} failed", numbers)
    if head.measured is None:
        return _without_reference(head, says, numbers)
    before, now = head.measured, head.reference
    known = [key for key in now["answers"] if key in before["answers"]]
    same = [key for key in known if now["answers"][key][0] == before["answers"][key][0]]
    if not known or before["shape"] != now["shape"]:
        return Finding(SKIPPED, f"{says}; the head was measured on other prompts: measure it again", numbers)
    if 2 * len(same) < len(known):
        cause = f"the target writes {len(known) - len(same)} of {len(known)} answers otherwise than when the head was "
        return Finding(FAILED, f"{says}; {cause}measured: its weights or their precision have changed", numbers)
    was, own = (_length([one["answers"][key][1:] for key in same]) for one in (before, now))
    changed = _changes(before, now)
    numbers |= {"compared": own, "measured": was, "changed": changed}
    says = f"{says}; {own:.3f} on {len(same)} answers that gave {was:.3f} when it was measured"
    since = f"changed since: {'; '.join(changed)}" if changed else "weights and settings are those of then"
    if was < LEAST_LENGTH:
        return Finding(SKIPPED, f"{says}: too little to tell; {since}", numbers)
    if own < was * (1 - SLACK):
        return Finding(FAILED, f"{says}; {since}", numbers)
    return Finding(OK, f"{says}; {since}{', without harm' if changed else ''}", numbers)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of a head is not what was measured, in words."""
    mine, then = ({key: _short_hash(value) for key, value in one["settings"].items()} for one in (now, before))
    found = [
        f"{key} is {_shown(now['settings'][key])}, was {_shown(before['settings'].get(key))}"
        for key, value in mine.items()
        if value != then.get(key, _short_hash(None))
    ]
    names = [name for name, value in now["tensors"].items() if before["tensors"].get(name) != value]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [*found, f"values of {', '.join(names[:SHOWN])}{more}"] if names else found


def _shown(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def _without_reference(head: CheckedHead, says: str, numbers: dict[str, Any]) -> Finding:
    """Whether the head accepts anything, and no more with its auxiliary layer ids moved by one: projects count layers
    by their inputs or outputs. The 95 % interval of the gain, paired by prompt, must lie above 0."""
    ids = head.draft.head.config.features.aux_layer_ids or ()
    counts = [_counts(one) for one in head.drafted]
    best = (own := numbers["accept_length"], ids)
    for moved in (tuple(one + shift for one in ids) for shift in (-1, 1) if ids):
        if not 0 <= moved[0] <= moved[-1] <= head.target.n_layers:
            continue
        others = [_counts(one) for one in head.with_chain(_with_layers(head.draft, moved))]
        units = [(*one, *other) for one, other in zip(counts, others, strict=True) if one[0] and other[0]]
        sure = len(units) >= LEAST_GROUPS and resampled_interval(units, lambda a, b, c, d: d / c - b / a)[0] > 0
        if sure and _length(others) >= LEAST_LENGTH:
            best = max(best, (_length(others), moved))
    if best[1] != ids:
        wrong = f"{best[0]:.2f} with the layers {list(best[1])} in place of its aux_layer_ids {list(ids)}"
        return Finding(FAILED, f"{says}, {wrong}: they are counted otherwise", numbers)
    if own < LEAST_LENGTH:
        cause = "it is not trained, damaged or made for another target"
        return Finding(FAILED, f"{says}: the head accepts next to nothing ({cause}; nothing tells which)", numbers)
    return Finding(SKIPPED, f"{says}; not compared: no run has measured this head (`toolkit run`)", numbers)


def _with_layers(draft: DraftCheckpoint, ids: tuple[int, ...]) -> DraftCheckpoint:
    head = copy.copy(draft.head)
    head.config = replace(draft.head.config, aux_layer_ids=ids)  # type: ignore[call-arg]
    return replace(draft, head=head)


# -- sampled continuations ---------------------------------------------------------------------------------------------
# The target itself gives the distribution of all WIDTH ** WRITTEN continuations: one forward over every beginning,
# without the engine, its cache or its sampler. G = 2 sum(seen * log(seen / expected)) follows a chi-square distribution
# with one degree of freedom less than there are cells (Wilks, 1938); cells of fewer than LEAST expected draws are taken
# together. In 2 million simulated tests the p-value fell below 1e-5 at most 1.3 times as often as it says.


def sampling_check(head: CheckedHead, verify: str) -> Finding:
    """Sampled continuations of one prompt follow the target's distribution when drafts are accepted by `verify`."""
    exact = head.continuations
    if exact is None:
        return Finding(SKIPPED, "rounding decides which tokens are the most probable")
    tree = verify == "target" and head.tree is not None
    shape = DraftShape(WRITTEN - 1, 2, 5) if tree else DraftShape.chain(WRITTEN - 1)
    engine = Engine(head.target, head.draft, shape, max_running_requests=BATCH, verify=verify)
    params = [
        SamplingParams(temperature=1.0, top_k=WIDTH, seed=seed, max_tokens=WRITTEN, ignore_eos=True)
        for seed in range(DRAWS)
    ]
    requests = engine.generate([exact.prompt] * DRAWS, params)
    engine.close()
    drawn = Counter(tuple(request.output_ids) for request in requests)
    counts = torch.tensor([drawn[path] for path in exact.probabilities], dtype=torch.float64)
    outside = DRAWS - int(counts.sum())
    kept = sum(event.accepted for request in requests for event in request.events)
    g, freedom, p = g_test(counts, DRAWS * torch.tensor(list(exact.probabilities.values()), dtype=torch.float64))
    numbers = {"shape": shape.as_text(), "draws": DRAWS, "accepted": kept, "outside": outside, "g": g, "p": p}
    says = f"{DRAWS} draws of {WRITTEN} tokens, {shape.name}, {kept} drafts accepted: G = {g:.1f} at {freedom} degrees"
    if outside:
        return Finding(FAILED, f"{outside} of {says}; by the target they cannot occur", numbers)
    says += f" of freedom, p = {p:.2g} (false-alarm probability {SAMPLING_ALARM:g})"
    return Finding(OK if p >= SAMPLING_ALARM else FAILED, says, numbers)


@torch.inference_mode()
def exact_distribution(target: Target, prompt: list[int]) -> Continuations:
    """The distribution of the first WRITTEN tokens after `prompt`, each from the WIDTH most probable ones."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    gap = float("inf")
    for _ in range(WRITTEN):
        ids = torch.tensor([[*prompt, *path] for path in paths], device=target.device)
        logits = target.logits(target.body(input_ids=ids, use_cache=False).last_hidden_state[:, -1]).double().cpu()
        top = logits.topk(WIDTH + 1, dim=-1)
        noise = logit_noise(target.dtype, logits.abs().max().item())
        gap = min(gap, float((top.values[:, -2] - top.values[:, -1]).min()) / noise)
        shares = top.values[:, :WIDTH].softmax(dim=-1)
        paths = {
            (*path, token): before * share
            for (path, before), tokens, of_path in zip(
                paths.items(), top.indices.tolist(), shares.tolist(), strict=True
            )
            for token, share in zip(tokens[:WIDTH], of_path, strict=True)
        }
    return Continuations(prompt, paths, gap)


def most_even_distribution(target: Target, prompts: Sequence[list[int]], stages: int) -> Continuations | None:
    """The distribution of the largest entropy among those of the first TRIED prompts; None if rounding decides which
    tokens are kept.

    Each prompt is cut to a page of the prefix cache and the few tokens that a head of `stages` stages needs after it,
    so that a draw reads few tokens again.
    """
    length = PAGE_SIZE + stages + 1
    found = [exact_distribution(target, prompt[-length:]) for prompt in prompts[:TRIED]]
    return max((one for one in found if one.gap > LEAST_GAP), key=lambda one: one.entropy, default=None)


def g_test(counts: Tensor, expected: Tensor) -> tuple[float, int, float]:
    """G of counts [K] against expected counts [K], its degrees of freedom and its p-value."""
    common = expected >= LEAST
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    if len(wanted) > 2 and wanted[-1] < LEAST:
        seen = torch.cat((seen[:-2], seen[-2:].sum()[None]))
        wanted = torch.cat((wanted[:-2], wanted[-2:].sum()[None]))
    g = 2 * float(torch.special.xlogy(seen, seen / wanted).sum())
    freedom = len(wanted) - 1
    half = torch.tensor([freedom / 2, max(g, 0.0) / 2], dtype=torch.float64)
    return g, freedom, float(torch.special.gammaincc(half[0], half[1]))
