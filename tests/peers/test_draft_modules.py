"""Our exports in the hands of their readers: the draft modules of speculators and SpecForge say the same logits.

Opt-in, since neither is a dependency: pip install --no-deps speculators==0.9.0 specforge==0.2.0 loguru
pydantic-settings python-dotenv hs-connectors==0.9.0, then pytest -m peers.

Shapes: T tokens, A auxiliary layers, Ht target hidden size.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.heads.dspark import DSparkConfig, DSparkHead
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.targets.facts import target_facts
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.ttt import unroll
from toolkit.weights import load_tensors

pytestmark = pytest.mark.peers
T, STEPS = 24, 3
# fp32 sums in another order; logits are of size 5. A norm at another place changes them by more than 0.1.
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def eager():
    """Both have parts that they compile, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def inputs(tiny_target):
    """Features [1, T, A*Ht] and token ids [T + STEPS]."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, tiny_target.vocab_size, (T + STEPS,), generator=generator)
    return 3 * torch.randn(1, T, 3 * tiny_target.hidden_size, generator=generator), ids


@pytest.fixture
def written(tiny_draft, tiny_target_directory, tmp_path):
    """Exports a random head with variants; returns it and its folder."""

    def write(to, **variants):
        torch.manual_seed(9)
        head = Eagle3Head(Eagle3Config.from_dict({**tiny_draft.head.config.to_dict(), **variants}))
        head = head.eval().requires_grad_(False)
        for name, value in head.named_parameters():
            value.copy_(torch.rand_like(value) + 0.5 if "norm" in name else 2 * value)
        draft = DraftCheckpoint(head, tiny_draft.token_map)
        export_head(draft, to, tmp_path / to, target_facts(tiny_target_directory), Shape(STEPS, 1, STEPS + 1))
        return head, tmp_path / to

    return write


@pytest.fixture
def check(tiny_target, inputs, verdicts):
    """Step by step, over the rows whose tokens are all known."""

    def compare(head, project: str, variants: dict, theirs: list[torch.Tensor]) -> None:
        aux, ids = inputs
        ours = unroll(head, aux, tiny_target.embed_tokens(ids[:T])[None], STEPS)
        pairs = [(head.logits(hidden[0]), said) for hidden, said in zip(ours, theirs, strict=True)]
        apart = [(mine - said)[: T - 1 - STEPS].abs().max().item() for mine, said in pairs]
        verdicts.append(
            {
                "judge": f"{project} {version(project)}, its draft module",
                "head": f"random, {variants or 'plain'}",
                "compared": f"logits of {STEPS} steps at {T - 1 - STEPS} positions, float32",
                "largest_difference": max(apart),
                "largest_logit": max(mine.abs().max().item() for mine, _ in pairs),
            }
        )
        assert max(apart) < CLOSE, f"by step: {apart}"

    return compare


@pytest.mark.parametrize(
    "variants",
    [
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "num_hidden_layers": 3},  # EAGLE-3.1
        {"qk_norm": True},
    ],
)
@torch.no_grad()
def test_speculators(inputs, written, check, variants):
    speculators = pytest.importorskip("speculators")
    head, directory = written("speculators", **variants)
    config = speculators.Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    module = speculators.Eagle3DraftModel.from_pretrained(directory, config=config).eval()
    said: list[torch.Tensor] = []
    module.lm_head.register_forward_hook(lambda _module, _inputs, logits: said.append(logits[0]))
    aux, ids = inputs
    module(aux, ids[None, 1 : T + 1], torch.zeros(1, T, dtype=torch.long), ttt_steps=STEPS)
    check(head, "speculators", variants, said)


DFLASH = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False, "sample_from_anchor": False}
BLOCK, ANCHORS = 5, 6


def block_of(head, target, features, ids, anchor: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [drafts, D] and confidences of the block that begins with the token at `anchor`, by dense attention."""
    head.read_target(target.embed_tokens)
    size, context = head.config.block_size, []
    hidden = head.first_hidden(features[:anchor])
    head.write_context(hidden, torch.arange(anchor), T, lambda k, v: context.append((k, v)))
    layers = iter(context)

    def attend(q, k, v):
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(next(layers), (k, v), strict=True))
        dense = torch.nn.functional.scaled_dot_product_attention
        return dense(q.transpose(0, 1), keys, values, enable_gqa=True).transpose(0, 1)

    root = target.embed_tokens(ids[anchor : anchor + 1]).expand(size, -1)
    states = head(root, hidden[-1:].expand(size, -1), anchor + torch.arange(size), attend, T)
    drafts = head.config.drafts_at_once
    before = ids[anchor : anchor + drafts]
    read = head.after(states[size - drafts :], before, target.embed_tokens)
    if head.config.own_output:
        return head.logits(read), head.confident(read)
    return head.extended(torch.nn.functional.linear)(read, target.lm_head.weight), head.confident(read)


@pytest.mark.parametrize(
    "variants",
    [
        {"sample_from_anchor": False},
        {"confidence_with_markov": False, "own_output": False},
        DFLASH,
    ],
)
@torch.no_grad()
def test_speculators_blocks(tiny_target, tiny_target_directory, tmp_path, verdicts, monkeypatch, variants):
    speculators = pytest.importorskip("speculators")
    own, size = variants.get("own_output", True), tiny_target.vocab_size
    kept = TokenMap.from_ids(range(3, 163), size) if own else TokenMap.identity(size)
    torch.manual_seed(9)
    head = DSparkHead(
        DSparkConfig.from_target_config(
            tiny_target.config, vocab_size=size, draft_vocab_size=kept.size, aux_layer_ids=(1, 2, 3),
            num_hidden_layers=2, block_size=BLOCK, mask_token_id=7, **{"markov_rank": 4, **variants},
        )
    ).eval().requires_grad_(False)  # fmt: skip
    for name, value in head.named_parameters():
        value.copy_(torch.rand_like(value) + 0.5 if "norm" in name else 2 * value)
    export_head(
        DraftCheckpoint(head, kept), "speculators", tmp_path / "o", target_facts(tiny_target_directory), Shape(4, 1, 5)
    )
    core = pytest.importorskip(f"speculators.models.{'dspark' if head.config.markov_rank else 'dflash'}.core")
    kind = core.DSparkDraftModel if head.config.markov_rank else core.DFlashDraftModel
    config = kind.config_class.from_pretrained(tmp_path / "o")
    config.transformer_layer_config._attn_implementation = "eager"
    module = kind.from_pretrained(tmp_path / "o", config=config).eval()
    module.load_verifier_weights()
    found: list[tuple] = []
    monkeypatch.setattr(core, "compute_metrics", lambda *said, **_: found.append(said) or (None, None))
    anchors = torch.arange(4, 4 + 2 * ANCHORS, 2)
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors", lambda *_: (anchors, torch.ones(ANCHORS, dtype=torch.bool))
    )
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, size, (T,), generator=generator)
    features = 3 * torch.randn(T, 3 * tiny_target.hidden_size, generator=generator)
    module(
        features[None], ids[None], torch.ones(1, T), torch.zeros(1, T, tiny_target.hidden_size),
        torch.zeros(1, T, dtype=torch.long), max_anchors=ANCHORS,
    )  # fmt: skip
    drafts = head.config.drafts_at_once
    logits = found[0][0].view(ANCHORS, BLOCK, -1)[:, BLOCK - drafts :]
    ours = [block_of(head, tiny_target, features, ids, int(anchor)) for anchor in anchors]
    apart = [(torch.stack([mine for mine, _ in ours]) - logits).abs().max().item()]
    if head.config.confidence:
        sure = found[0][2].view(ANCHORS, BLOCK)[:, BLOCK - drafts :]
        apart.append((torch.stack([mine for _, mine in ours]) - sure).abs().max().item())
    verdicts.append(
        {
            "judge": f"speculators {version('speculators')}, its draft module",
            "head": f"random, dspark, {variants or 'plain'}",
            "compared": f"logits and confidences of {ANCHORS} blocks of {drafts} drafts, float32",
            "largest_difference": max(apart),
            "largest_logit": logits.abs().max().item(),
        }
    )
    assert speculators is not None and max(apart) < CLOSE, apart


@pytest.mark.parametrize("variants", [{}, {"fc_norm": True}])
@torch.no_grad()
def test_specforge(tiny_target, inputs, written, check, variants):
    theirs = pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    head, directory = written("sglang", **variants)
    module = theirs.LlamaForCausalLMEagle3(theirs.LlamaConfig.from_pretrained(directory)).eval()
    tensors = load_tensors(directory / "model.safetensors")
    module.load_state_dict({**tensors, "embed_tokens.weight": tiny_target.embed_tokens.weight})
    aux, ids = inputs
    hidden, cache, said = module.project_hidden_states(aux), [[], []], []
    mask = theirs.prepare_decoder_attention_mask(torch.ones(1, T, dtype=torch.bool), (1, T), hidden, 0)
    for step in range(STEPS):
        embeds = module.embed_input_ids(ids[None, 1 + step : 1 + step + T])
        hidden = module.backbone(embeds, hidden, cache, mask, torch.arange(T)[None])
        said.append(module.compute_logits(hidden)[0])
    check(head, "specforge", variants, said)
