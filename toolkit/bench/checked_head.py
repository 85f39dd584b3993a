"""What `toolkit check` looks at: a head on its target in float32, and the texts that its checks share.

Shapes: T tokens of an answer, P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.bench.prompts import BUILTIN
from toolkit.bench.sampled_distribution import Continuations, most_even_distribution
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError, check_draft_fits
from toolkit.errors import TargetError
from toolkit.heads.dspark import DSparkHead
from toolkit.infer.drafters.block_drafter import bias_of_map, block_of, default_shape, drafts_at_once
from toolkit.infer.drafters.drafting_head import DraftingHead
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import DraftShapeError
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.features import AuxCapture, check_aux_layer_ids
from toolkit.targets.target import Target

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
TREE = DraftShape(4, 4, 16)  # the tree that `toolkit bench` measures


@dataclass(frozen=True)
class Finding:
    """The result of one check: OK, FAILED or SKIPPED, one line that says why, and its numbers for the record."""

    status: str
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


class Greedy(NamedTuple):
    """Prompts decoded together: the number of requests at once, and each prompt's shape (None: plain) and request."""

    batch: int
    prompts: Sequence[int]
    shapes: Sequence[DraftShape | None]
    requests: Sequence[Request]


class FirstDrafts(NamedTuple):
    """The head's first draft at every position of an answer of plain decoding, the position's features given.

    right [T] bool: it is the answer's token. log_probability [T]: what the head gives to the answer's token; nan if the
    draft vocabulary lacks it.
    """

    right: Tensor
    log_probability: Tensor


@dataclass
class CheckedHead:
    """A head and its target, both in float32 on one device. Texts are computed once, when a check first needs them.

    prompts_sha256: of the built-in prompts, as records have it.
    finite: by the name of each tensor of the head, whether all its values are; an engine's packed weights cannot tell.
    """

    draft: DraftCheckpoint
    target: Target
    prompts: Sequence[list[int]]
    prompts_sha256: str
    max_tokens: int
    finite: Mapping[str, bool]

    @cached_property
    def layer_error(self) -> str | None:
        """What is wrong with the auxiliary layer ids for this target; None if nothing is."""
        ids = self.draft.head.config.features.aux_layer_ids
        try:
            if ids is not None:
                check_aux_layer_ids(ids, self.target.n_layers)
        except TargetError as error:
            return str(error)
        return None

    @cached_property
    def fit_error(self) -> str | None:
        """Why the head cannot work on the target, by its sizes or its embedding; None if it can."""
        try:
            if not self.layer_error:
                check_draft_fits(self.draft, self.target)
        except DraftDirError as error:
            return str(error)
        return None

    @property
    def cannot_draft(self) -> str | None:
        """Why the head cannot draft; None if it can."""
        if self.fit_error:
            return "the head does not fit the target"
        if self.layer_error:
            return "the target lacks its auxiliary layers"
        return None if all(self.finite.values()) else "its weights are not finite"

    @property
    def native(self) -> bool:
        """Whether it is the module of the target's own checkpoint."""
        return "native" in self.draft.meta

    @property
    def from_other_project(self) -> bool:
        """Whether another project wrote its files."""
        return "writer" in self.draft.meta

    def measured_row(self, shape: str) -> dict[str, Any] | None:
        """The row of measured.json of the deepest "chain" or "tree"; None if the built-in prompts were not measured
        greedily."""
        measured = self.draft.meta.get("measured") or {}
        settings = measured.get("settings") or {}
        if settings.get("prompts") != BUILTIN or settings.get("temperature") != 0:
            return None
        rows = [row for row in measured.get("rows") or () if row["shape"] == shape]
        return max(rows, key=lambda row: row["num_steps"], default=None)

    def unlike_record(self) -> list[str]:
        """How what is decoded here differs from the measurement in measured.json; [] if both can be compared."""
        measured = self.draft.meta.get("measured") or {}
        then, target = measured.get("settings") or {}, measured.get("target") or {}
        pairs = {
            "dtype": (target.get("dtype"), str(self.target.dtype).removeprefix("torch.")),
            "quantization": (target.get("quantization"), self.target.quantization),
            "max_tokens": (then.get("max_tokens"), self.max_tokens),
        }
        found = [f"{name} {recorded}, here {here}" for name, (recorded, here) in pairs.items() if recorded != here]
        if then.get("prompts_sha256") != self.prompts_sha256:
            limit = then.get("limit")
            found.append(f"{'all' if limit is None else limit} built-in prompts, here {len(self.prompts)} of them")
        return found

    # -- decoding ------------------------------------------------------------------------------------------------------

    @cached_property
    def shapes(self) -> tuple[DraftShape, DraftShape | None]:
        """A chain and a tree, those of measured.json if it has them. None: the target verifies no trees."""
        found = []
        own, at_once = DraftShape.chain(3) if self.native else default_shape(self.draft), drafts_at_once(self.draft)
        for name, default in (("chain", own), ("tree", TREE.up_to(at_once) if at_once else TREE)):
            row = self.measured_row(name)
            sizes = ("num_steps", "top_k", "num_draft_tokens")
            found.append(default if row is None else DraftShape(*(row[size] for size in sizes)))
        chain, tree = found
        return chain, tree if self.supports(tree) else None

    def supports(self, shape: DraftShape) -> bool:
        """Whether head and target support a shape."""
        try:
            self.engine(shape).close()
        except DraftShapeError:
            return False
        return True

    def engine(self, shape: DraftShape | None, batch: int = 1, verify: str = "target") -> Engine:
        """An engine for these models; shape None: plain decoding."""
        draft = None if shape is None else self.draft
        return Engine(self.target, draft, shape, max_running_requests=batch, verify=verify)

    @cached_property
    def plain(self) -> list[list[int]]:
        """The greedy answer of plain decoding to each prompt."""
        engine = self.engine(None, len(self.prompts))
        done = engine.generate(self.prompts, SamplingParams(max_tokens=self.max_tokens))
        engine.close()
        return [list(request.output_ids) for request in done]

    @cached_property
    def greedy(self) -> list[Greedy]:
        """Speculative answers: each prompt with the chain and with the tree, once alone and once in a mixed batch.

        The mixed batch decodes half of the prompts plainly too.
        """
        chain, tree = self.shapes
        every = list(range(len(self.prompts)))
        alone = [chain if tree is None or at % 2 == 0 else tree for at in every]
        mixed = [chain if tree is None or at % 2 else tree for at in every] + [None] * len(every[::2])
        done = []
        for batch, shapes, prompts in ((1, alone, every), (len(mixed), mixed, every + every[::2])):
            engine = self.engine(chain if tree is None else DraftShape.covering((chain, tree)), batch)
            params = SamplingParams(max_tokens=self.max_tokens)
            requests = [
                engine.add_request(self.prompts[at], params, speculative=shape is not None, shape=shape)
                for at, shape in zip(prompts, shapes, strict=True)
            ]
            while engine.has_work():
                engine.step()
            engine.close()
            done.append(Greedy(batch, prompts, shapes, requests))
        return done

    @cached_property
    def continuations(self) -> Continuations | None:
        """The exact distribution that sampled continuations of a prompt are compared with."""
        return most_even_distribution(self.target, self.prompts, self.draft.head.config.stages)

    # -- the head's first drafts ---------------------------------------------------------------------------------------

    @property
    def shifts(self) -> tuple[int, ...]:
        """Shifts of all auxiliary layer ids that the target has layers for: 0, and -1 and 1; () if there are none."""
        ids = self.draft.head.config.features.aux_layer_ids
        if ids is None:
            return ()
        return tuple(shift for shift in (0, -1, 1) if 0 <= ids[0] + shift and ids[-1] + shift <= self.target.n_layers)

    def shifted(self, shift: int) -> tuple[int, ...]:
        """The head's auxiliary layer ids, each moved by `shift`."""
        return tuple(one + shift for one in self.draft.head.config.features.aux_layer_ids or ())

    @cached_property
    def first_drafts(self) -> dict[int, list[FirstDrafts]]:
        """The first drafts at all positions of the plain answers of two tokens and more, by shift (0: as recorded)."""
        head = DraftingHead(self.draft, self.target)
        captures = {shift: AuxCapture(self.target, self.shifted(shift)) for shift in self.shifts if shift}
        found: dict[int, list[FirstDrafts]] = {shift: [] for shift in (0, *captures)}
        try:
            for prompt, answer in zip(self.prompts, self.plain, strict=True):
                if len(answer) < 2:
                    continue  # its only token is the target's
                text = torch.tensor(prompt + answer, device=self.target.device)
                with torch.inference_mode():
                    self.target.body(input_ids=text[None], use_cache=False)
                    found[0].append(self._first_drafts(head, head.features()[0], text, len(prompt)))
                    for shift, capture in captures.items():
                        found[shift].append(self._first_drafts(head, capture.take()[0], text, len(prompt)))
        finally:
            head.remove()
            for capture in captures.values():
                capture.remove()
        return found

    def _first_drafts(self, head: DraftingHead, features: Tensor, text: Tensor, written: int) -> FirstDrafts:
        """One pass of the head over a text [T] with the features [T, W] of its positions.

        Position i reads its features and token i+1, and predicts token i+2; the last two positions predict nothing.
        """
        count = len(text) - 2
        positions = torch.arange(count, device=text.device)
        window = self.draft.head.config.sliding_window or count
        back = positions[:, None] - positions
        seen = (back >= 0) & (back < window)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

        embeds, first = self.target.embed_tokens(text[1:-1]), head.first_hidden(features[:count])
        if isinstance(head.module, DSparkHead):
            states = _first_drafts(head.module, embeds, first)[written - 1 :]
            logits = _scores_after(head, states, text[written:-1]).float()
        else:
            hidden = head.step(0, embeds, first, positions, attend, count)
            logits = head.logits(0, hidden[written - 1 :]).float()
        wanted = self.draft.token_map.to_draft(text[written + 1 :])
        given = logits.log_softmax(dim=-1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        return FirstDrafts((logits.argmax(dim=-1) == wanted).cpu(), given.masked_fill(wanted < 0, torch.nan).cpu())


def _scores_after(head: DraftingHead, states: Tensor, before: Tensor) -> Tensor:
    """Logits [T, D] of a block drafter's states [T, H] after the tokens `before` [T]."""
    scores, given, bias = head.logits(0, states), block_of(head).before(before), bias_of_map(head)
    return scores if given is None or bias is None else scores + given.to(scores.dtype) @ bias.to(scores.dtype)


def _first_drafts(head: DSparkHead, embeds: Tensor, hidden: Tensor) -> Tensor:
    """States [T, H] of the first draft of a block drafter at every position; embeds [T, H] of the token
    after it, hidden [T, ..] of its features."""
    count, size = len(embeds), head.config.block_size
    every, context = torch.arange(count, device=embeds.device), list[tuple[Tensor, Tensor]]()
    head.write_context(hidden, every, count + size, lambda k, v: context.append((k, v)))
    roots, layers = every.repeat_interleave(size), iter(context)
    seen = torch.cat((every <= roots[:, None], roots == roots[:, None]), dim=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat(pair) for pair in zip(next(layers), (k, v), strict=True))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    at = roots + 1 + torch.arange(size, device=embeds.device).repeat(count)
    states = head(*(x.repeat_interleave(size, dim=0) for x in (embeds, hidden)), at, attend, count + size)
    return states.unflatten(0, (count, size))[:, size - head.config.drafts_at_once]
