"""The distribution of what is written, under every verifier: G-test against the exact one, by simulation.

The simulation runs the engine's own functions over 30,000 seeds at once, without a model: p and q are
tables over 8 tokens that depend on the two tokens before, q over a draft vocabulary of 5. Chains are ragged and several
rounds follow one another, so that drafts are drawn anew where an earlier round had drafted in vain.

Seeds are fixed, so every outcome is too; were they fresh, chance alone would fail an exact verifier once in 1e6 runs of
a test. The tests at the end show that a wrong one does fail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import Proposal, chain_tree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.logits_processors import GrammarMasks
from toolkit.infer.verify.token_distribution import RowDistributions, Stream, draw_from
from toolkit.infer.verify.verifiers import (
    BLOCK,
    REJECTION,
    DrawnChains,
    Verifier,
    block,
    by,
    follow,
    read_result,
)

VOCAB, WRITTEN, STEPS, RUNS = 8, 3, 3, 30_000
KEPT = torch.tensor([0, 2, 3, 5, 6])  # the draft vocabulary
START = VOCAB  # stands before the first token
Z = 4.753  # normal quantile at 1 - 1e-6


@pytest.fixture(autouse=True)
def all_rows_at_once(monkeypatch):
    """Tens of thousands of rows in parts of an engine's size would take long."""
    monkeypatch.setattr("toolkit.infer.verify.verifiers.LOGIT_ROWS", 8 * RUNS)


class Tables:
    """A target and a head: logits by the two tokens before. The head knows the target roughly, and 5 tokens."""

    def __init__(self, seed: int = 0, noise: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB, generator=generator) * 1.3
        self.head = self.target[..., KEPT] + noise * torch.randn(VOCAB + 1, VOCAB + 1, len(KEPT), generator=generator)

    def joint(self, params: SamplingParams) -> Tensor:
        """The exact distribution of WRITTEN tokens, [V ** WRITTEN] fp64."""
        p = one_distribution(self.target, params).double()
        return (p[START, START][:, None, None] * p[START, :-1][:, :, None] * p[:-1, :-1]).flatten()


def one_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of logits [..., V] under the settings of `params`."""
    return RowDistributions.of([params], logits.device).probs(logits.flatten(0, -2)[None]).view(logits.shape)


@cache
def seeded(runs: int, params: SamplingParams) -> RowDistributions:
    """`runs` requests that differ in their seeds."""
    distributions = RowDistributions.of([params], torch.device("cpu"))
    of_rows = {name: value for name, value in vars(distributions).items() if isinstance(value, torch.Tensor)}
    repeated = {name: value.repeat_interleave(runs, dim=0) for name, value in of_rows.items()}
    return replace(distributions, **{**repeated, "seeds": torch.arange(runs)})


def simulate(
    verifier: Verifier,
    params: SamplingParams,
    tables: Tables,
    runs: int = RUNS,
    ragged: bool = True,
    masks: GrammarMasks | None = None,
    keep_q: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rounds of drafting and verifying until WRITTEN tokens stand in every run.

    masks: of a grammar; drafts are drawn as if there were none, then cut. keep_q: leave the distribution of the drafts
    as it was, which is wrong. Returns the tokens [runs, WRITTEN] and how many drafts the first round kept [runs].
    """
    distributions = seeded(runs, params)
    every = torch.arange(runs)
    text = torch.full((runs, 2 + WRITTEN + STEPS), START)
    length = torch.full((runs,), 2)
    first: Tensor | None = None
    for round_number in range(WRITTEN):
        # A run has a shorter chain from time to time, and none at all.
        counts = (STEPS - (every + round_number) % (STEPS + 1)) if ragged else torch.full((runs,), STEPS)
        roots = length[:, None]
        before = [text[every, length - 2], text[every, length - 1]]
        logits, drawn_from = [tables.target[before[-2], before[-1]]], []
        for level in range(STEPS):
            q = distributions.probs(tables.head[before[-2], before[-1]][:, None])
            drawn_from.append(q)
            u = distributions.round_uniform(roots, roots + level, Stream.DRAFT)
            before.append(KEPT[draw_from(q[:, 0], u[:, 0])])
            logits.append(tables.target[before[-2], before[-1]])
        proposal = Proposal(torch.cat(drawn_from, dim=1), KEPT)
        drawn = chain_tree(
            before[1], torch.stack(before[2:], dim=1), counts.tolist(), proposal if verifier.draws_drafts else None
        )
        tree = drawn if masks is None else masks.cut(drawn)
        at_nodes = torch.stack(logits[: tree.nodes], dim=1)
        if masks is not None:
            masks.apply(at_nodes, tree, 0)
            if keep_q and tree.proposal is not None:
                tree = replace(tree, proposal=Proposal(proposal.q[:, : tree.nodes - 1], KEPT))
        tokens = verifier.choose(distributions, at_nodes, roots + torch.arange(tree.nodes), tree, every)
        result = read_result(follow(tree, tokens))
        accepted = torch.tensor(result.accepted)
        first = accepted if first is None else first
        for step in range(result.tokens.shape[1]):
            place = (length + step).clamp(max=text.shape[1] - 1)
            text[every, place] = torch.where(step <= accepted, result.tokens[:, step], text[every, place])
        length = (length + accepted + 1).clamp(max=2 + WRITTEN)
    assert first is not None and int(length.min()) == 2 + WRITTEN
    return text[:, 2 : 2 + WRITTEN], first


def misfit(counts: Tensor, wanted: Tensor, z: float = Z) -> tuple[float, float]:
    """G of counts against expected counts [K], rare cells taken together, and its quantile at the normal's z (Z: at
    1 - 1e-6; 4.265: at 1 - 1e-5)."""
    common = wanted >= 5
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((wanted[common], wanted[~common].sum()[None]))
    seen, expected = seen[expected > 0], expected[expected > 0]
    g = 2 * torch.where(seen > 0, seen * (seen / expected).log(), 0.0).sum().item()
    freedom = len(seen) - 1
    return g, freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty


def cells(tokens: Tensor) -> Tensor:
    """Counts of whole continuations, [V ** WRITTEN] fp64."""
    places = (tokens * VOCAB ** torch.arange(WRITTEN - 1, -1, -1)).sum(dim=1)
    return torch.bincount(places, minlength=VOCAB**WRITTEN).double()


SETTINGS = [
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.93, min_p=0.02, seed=0),
]


@pytest.mark.parametrize(
    ("verifier", "params"),
    [
        (REJECTION, SETTINGS[1]),
        (BLOCK, SETTINGS[0]),
        pytest.param(REJECTION, SETTINGS[0], marks=pytest.mark.slow),
        pytest.param(BLOCK, SETTINGS[1], marks=pytest.mark.slow),
    ],
)
def test_distribution_is_exact(verifier, params):
    """G-test of all 512 continuations."""
    tables = Tables()
    counts = cells(simulate(verifier, params, tables)[0])
    g, limit = misfit(counts, tables.joint(params) * RUNS)
    assert g < limit, f"G = {g:.1f}, limit {limit:.1f}"


def expected_kept(tables: Tables, params: SamplingParams) -> tuple[float, float, float]:
    """Drafts kept of a chain of STEPS, in the mean, by enumeration: rejection, block, and `target` with best drafts.

    rejection: every draft passes with min(1, p/q). block: P(at least i | X^i) = w_i. target: p of the head's best.
    """
    p, small = one_distribution(tables.target, params).double(), one_distribution(tables.head, params).double()
    q = torch.zeros_like(p)
    q[..., KEPT] = small
    paths = [(START, START, 1.0, 1.0, 1.0)]  # two tokens, chance that each is kept, chance to be drafted, w
    by_rejection = by_block = by_target = 0.0
    for _ in range(STEPS):
        grown = []
        for a, b, kept, drafted, w in paths:
            for x in KEPT.tolist():
                px, qx = p[a, b, x].item(), q[a, b, x].item()
                if qx > 0:
                    grown.append((b, x, kept * min(px, qx), drafted * qx, min(1.0, w * px / qx)))
        paths = grown
        by_rejection += sum(kept for _, _, kept, _, _ in paths)
        by_block += sum(drafted * w for _, _, _, drafted, w in paths)
    a, b, kept = START, START, 1.0
    for _ in range(STEPS):
        best = int(q[a, b].argmax())
        kept *= p[a, b, best].item()
        by_target += kept
        a, b = b, best
    return by_rejection, by_block, by_target


def test_block_keeps_more_drafts_than_rejection():
    """The mean number kept equals the papers' formulas (a wrong coin shows here first), and block's is the larger.

    Means of 30,000 runs lie within 4.9 standard errors of the expectation with probability 1 - 1e-6.
    """
    params, tables = SETTINGS[0], Tables()
    *wanted, by_target = expected_kept(tables, params)
    means, errors = [], []
    for verifier, mean in zip((REJECTION, BLOCK), wanted, strict=True):
        kept = simulate(verifier, params, tables, ragged=False)[1].double()
        error = kept.std().item() / math.sqrt(RUNS)
        assert abs(kept.mean().item() - mean) < 4.9 * error, verifier.name
        means.append(kept.mean().item())
        errors.append(error)
    assert means[1] - means[0] > 4.9 * math.hypot(*errors)
    assert means[0] > by_target  # on distributions as flat as these a drawn draft is better than the best one


# -- what is wrong must fail ------------------------------------------------------------------------------------------


def acceptance_without_q(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """The rule for drafts that were not drawn, on drafts that were."""
    kept = (chains.drafted & (chains.coins < chains.at_drafts()[0])).long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(kept))
    return kept, (chains.p[row, kept] - chains.q[row, kept]).clamp(min=0)


def block_without_weights(chains: DrawnChains) -> tuple[Tensor, Tensor]:
    """Block's number of drafts with token-wise rejection's residual."""
    kept, _ = block(chains)
    row = torch.arange(len(kept))
    return kept, (chains.p[row, kept] - chains.q[row, kept]).clamp(min=0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [acceptance_without_q, block_without_weights], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_found(rule):
    """The same test with more runs must fail, or it would say nothing about the right rules."""
    tables = Tables()
    counts = cells(simulate(Verifier("wrong", by(rule), True), SETTINGS[0], tables, 2 * RUNS)[0])
    g, limit = misfit(counts, tables.joint(SETTINGS[0]) * 2 * RUNS)
    assert g > 1.1 * limit


def test_numbers_used_in_two_rounds_are_found(monkeypatch):
    """Block verification with numbers by position alone, as the target's own draws have them, is not exact: how many
    drafts it keeps depends on the drafts behind them, and those would be drawn again."""
    tables = Tables()
    fresh = RowDistributions.round_uniform
    monkeypatch.setattr(RowDistributions, "round_uniform", lambda self, roots, *rest: fresh(self, roots * 0, *rest))
    counts = cells(simulate(BLOCK, SETTINGS[0], tables, ragged=False)[0])
    g, limit = misfit(counts, tables.joint(SETTINGS[0]) * RUNS)
    assert g > limit
