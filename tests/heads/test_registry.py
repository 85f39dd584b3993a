"""A kind of head is one module and one line in the registry: all else works with its protocol."""

from __future__ import annotations

import pytest

from toolkit.checkpoint.open_head import FORMATS
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import head_class
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head
from toolkit.train_settings import HeadSettings, TrainSettings


def test_every_kind_is_known_by_one_name_everywhere():
    """config.json, recipes and exports name a kind; a name that one of them lacks fails late, at its first use."""
    assert {name: head_class(name).config_class.kind for name in HEAD_KINDS} == {name: name for name in HEAD_KINDS}
    assert set(FORMATS) <= set(HEAD_KINDS), "other kinds have no format elsewhere"


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_recipes_count_mtp_layers_as_the_head_does(tiny_target, kind):
    """Recipes are checked before any head is known; another count would refuse, or allow, layers that never train."""
    settings = TrainSettings(head=HeadSettings(kind=kind, layers=2))
    plan = plan_head(settings, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    assert plan.config.mtp_layers == settings.head.mtp_layers
    assert plan.config.mtp_layers * plan.config.layers == 2
