"""A kind of head is one module and one line in the registry: all else works with its protocol."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from tests.train.conftest import answered, answers_of, fit
from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_matches, load_draft, save_draft
from toolkit.checkpoint.open_head import FORMATS, exported
from toolkit.errors import ExportError
from toolkit.head_kinds import HEAD_KINDS, HeadKind
from toolkit.heads.decoder_layer import DecoderLayer, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, WarmStart, head_class
from toolkit.heads.head_config import EngineNames, Features, HeadConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.facts import target_facts
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.step import replayed_steps
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

STEPS = 3


@dataclass(frozen=True)
class NewConfig(HeadConfig):
    """What no kind of ours combines: two decoder layers, the state before the target's final norm, the target's output
    matrix behind a norm of the head's own."""

    kind = "new"
    engine_names = EngineNames(sglang="NEW", vllm="new")

    depth: int = 2

    @property
    def layers(self) -> int:
        return self.depth

    @property
    def features(self) -> Features:
        return Features(after_norm=False)

    @classmethod
    def from_settings(cls, settings, config, *, vocab_size, draft_vocab_size, n_layers):
        return cls.from_target_config(config, vocab_size=vocab_size, depth=settings.layers)

    def serving_keys(self):
        return {"architectures": ["NewHead"]}


class NewHead(DraftHead):
    config_class = NewConfig

    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.config = config
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, attention_bias=False) for _ in range(config.depth))
        self.last_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def forward(self, embeds, hidden, positions, attend, reach, mtp_layer=0):
        cos, sin = self.rope(positions, embeds, reach)
        x = self.join(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def read(self, stage, hidden):
        return self.last_norm(hidden)

    def warm_start(self):
        return WarmStart(
            copies=[LayerCopy(layer, number - len(self.layers)) for number, layer in enumerate(self.layers)],
            last_norm=("last_norm.weight", self.last_norm),
            solved=self.join,
            solved_reads=lambda embeds, features: torch.cat((embeds, features), dim=-1),
        )


@pytest.fixture
def registered(monkeypatch) -> None:
    """The one file, and the one line."""
    monkeypatch.setitem(sys.modules, "toolkit.heads.new", sys.modules[__name__])
    monkeypatch.setitem(HEAD_KINDS, "new", HeadKind("NewHead"))


def test_every_kind_is_known_by_one_name_everywhere():
    """config.json, recipes and exports name a kind; a name that one of them lacks fails late, at its first use."""
    assert {name: head_class(name).config_class.kind for name in HEAD_KINDS} == {name: name for name in HEAD_KINDS}
    assert set(FORMATS) <= set(HEAD_KINDS), "other kinds have no format elsewhere"


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_recipes_count_stages_as_the_head_does(tiny_target, kind):
    """Recipes are checked before any head is known; another count would refuse, or allow, layers that never train."""
    settings = TrainSettings(head=HeadSettings(kind=kind, layers=2))
    plan = plan_head(settings, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    assert plan.config.mtp_layers == settings.head.mtp_layers
    assert plan.config.mtp_layers * plan.config.layers == 2


def test_a_new_kind_trains_is_stored_and_served(registered, tiny_target, tiny_target_directory, tmp_path):
    """Training's forecast of each verify step is what the engine accepts, so that both run the same head alike."""
    settings = TrainSettings(head=HeadSettings(kind="new", layers=2), unroll=UnrollSettings(ttt_steps=STEPS))
    plan = plan_head(settings, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    assert plan.aux_layer_ids == (tiny_target.n_layers,), "the last layer's output, before the final norm"
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, tiny_target.vocab_size, (6,), generator=generator).tolist() for _ in range(6)]
    written = answers_of(tiny_target, prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    batch = answered(prompts, written)

    head = start_head(plan, settings, tiny_target, 0, [batch])
    copied = head.layers[0].mlp.up_proj.weight
    assert torch.equal(copied, tiny_target.layers[-2].mlp.up_proj.weight) and head.join.weight.abs().max() > 0.1
    side = TargetSide(tiny_target, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, head, side.teacher)
    fit(model, side, batch, STEPS, updates=40)

    directory = save_draft(tmp_path / "ckpt", head.state_dict(), plan.config, None, {})
    draft = load_draft(directory)
    assert draft.kind == "new" and draft.head.config == plan.config
    check_draft_matches(draft, tiny_target)
    with pytest.raises(ExportError, match="a new head cannot be written for vllm"):
        exported(draft, "vllm", target_facts(tiny_target_directory), STEPS)
    engine = Engine(tiny_target, draft, DraftShape.chain(STEPS))
    requests = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    engine.close()
    assert [one.output_ids for one in requests] == written
    served = [[event.accepted for event in one.events if not event.truncated] for one in requests]
    assert replayed_steps(model.eval(), side, [batch], STEPS) == served
    assert {count for steps in served for count in steps} > {0, 1}, "else little is compared"
    side.capture.remove()


def test_a_head_of_other_sizes_is_refused(registered, tiny_target):
    """Sizes that must be the target's are named by the config, whatever its kind."""
    config = NewConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size)
    narrow = replace(config, hidden_size=32)
    with pytest.raises(ValueError, match=r"hidden_size 32 \(the target's is 64\)"):
        check_draft_matches(DraftCheckpoint(NewHead(narrow), TokenMap.identity(config.vocab_size)), tiny_target)
