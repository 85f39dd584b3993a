"""The exact distribution of sampled continuations, and a G-test of draws against it.

The first WRITTEN tokens after a short prompt are drawn at temperature 1 from the WIDTH most probable tokens, DRAWS
times with other seeds. The target itself gives the distribution of all WIDTH ** WRITTEN continuations: one forward over
every beginning, without the engine, its cache or its sampler.

G = 2 sum(seen * log(seen / expected)) follows a chi-square distribution with one degree of freedom less than there are
cells (Wilks, 1938). Cells of fewer than LEAST expected draws are taken together. In 2 million simulated tests of such
distributions the p-value fell below 1e-3, 1e-4 and 1e-5 at most 1.3 times as often as it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.bench.near_tie import logit_noise
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target

WRITTEN, WIDTH, DRAWS, LEAST = 3, 4, 1000, 10
SAMPLING_ALARM = 1e-6  # chance that an exact engine fails a test
BATCH = 64
TRIED = 4  # prompts, of which the one with the most even distribution is taken
LEAST_GAP = 10.0
CHAIN, TREE = DraftShape.chain(WRITTEN - 1), DraftShape(WRITTEN - 1, 2, 5)


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


def drawn_test(
    target: Target, draft: DraftCheckpoint, exact: Continuations, verify: str, *, tree: bool
) -> tuple[bool, str, dict[str, Any]]:
    """Draw continuations in an engine that accepts drafts by `verify`. Returns whether they may follow the exact
    distribution, a line that says why, and its numbers."""
    shape = TREE if tree else CHAIN
    engine = Engine(target, draft, shape, max_running_requests=BATCH, verify=verify, disable_cuda_graph=True)
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
        return False, f"{outside} of {says}; by the target they cannot occur", numbers
    says += f" of freedom, p = {p:.2g} (false-alarm probability {SAMPLING_ALARM:g})"
    return p >= SAMPLING_ALARM, says, numbers
