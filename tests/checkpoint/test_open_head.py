"""Heads of other projects, with their real key names: read bit for bit, and served without changing an answer."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.conftest import check_same
from toolkit.checkpoint.files import load_pickle
from toolkit.checkpoint.open_head import open_head
from toolkit.errors import DraftDirError
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.weights import WeightsError, load_tensors, save_tensors, write_json

AUX = "eagle_aux_hidden_state_layer_ids"
EAGLE31 = {"fc_norm": True, "norm_output": True}
PUBLISHED = [
    ("safeailab", {}),
    ("specforge", {"fc_norm": True}),
    ("angelslim", {}),
    ("nemo", {}),
    ("speculators", {"norm_before_residual": True, "norm_before_fc": True}),
    ("speculators", {"num_hidden_layers": 2, "qk_norm": True, **EAGLE31}),
    ("modelopt", {"num_hidden_layers": 3}),
]


@pytest.fixture
def target(tiny_target_directory) -> str:
    return str(tiny_target_directory)


def lines(draft, key: str) -> list:
    return [one for one in draft.resolutions if one.key == key]


def check_serves(directory, target, **opened_with) -> None:
    """Drafts with it, and writes what plain decoding writes."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    opened = load_engine(EngineConfig(draft=directory, target=target, shape="3,2,6", dtype="float32", **opened_with))
    prompts = [[5, 6, 7], [8, 9]]
    plain = opened.engine.generate(prompts, params, speculative=False)
    drafted = opened.engine.generate(prompts, params)
    opened.engine.close()
    assert [one.output_ids for one in drafted] == [one.output_ids for one in plain]
    assert all(event.offered == 5 for one in drafted for event in one.events) and drafted[0].events


@pytest.mark.parametrize(("project", "variants"), PUBLISHED)
def test_published_eagle3(make_draft, publish, target, project, variants):
    """A name that is mapped wrongly, a norm that is left out or an aux id that is off by one breaks this."""
    draft = make_draft("eagle3", **variants)
    directory = publish(project, draft.head)
    check_same(draft, directory, target)
    check_serves(directory, target)


def test_published_eagle1(make_draft, tiny_target, publish, target):
    """EAGLE-1/2: the last layer's feature, no lm_head; a trained bias of fc must not be lost."""
    draft = make_draft("eagle2")
    embedding = tiny_target.embed_tokens.weight.detach().clone()
    directory = publish("eagle1", draft.head, lambda _, tensors: tensors.update({"embed_tokens.weight": embedding}))
    check_same(draft, directory, target)
    check_serves(directory, target)


def test_shards(make_draft, publish, target):
    """Large heads come in shards with an index; a shard that is not read would be missing tensors."""
    draft = make_draft("eagle3")
    directory = publish("specforge", draft.head)
    tensors = load_tensors(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("model-1.safetensors", "model-2.safetensors")
    index = {name: shards[number % 2] for number, name in enumerate(names)}
    for shard in shards:
        save_tensors(directory / shard, {name: tensors[name] for name in names if index[name] == shard})
    write_json(directory / "model.safetensors.index.json", {"weight_map": index})
    check_same(draft, directory, target)
    for wrong in ([], {"weight_map": list(index)}, {"weight_map": dict.fromkeys(index, 1)}):
        write_json(directory / "model.safetensors.index.json", wrong)
        with pytest.raises(WeightsError, match="has no weight_map of tensor names to files"):
            open_head(directory, target=target)


class TestResolutions:
    """Every ambiguous setting has a rule, which is said; the user's word wins."""

    def test_unstated_ids_are_the_targets_usual_ones(self, make_eagle3, publish, target):
        directory = publish("safeailab", make_eagle3())
        assert open_head(directory, target=target).head.config.aux_layer_ids == (2, 3, 4)
        with pytest.raises(DraftDirError, match="name it with `target`"):
            open_head(directory)

    @pytest.mark.parametrize(
        ("project", "place", "ids"),
        [
            ("specforge", lambda c: c["eagle_config"], [2, 3, 4]),
            ("speculators", lambda c: c, [1, 2, 3]),
        ],
    )
    def test_ids_in_the_other_convention_are_warned_of(self, make_eagle3, publish, target, project, place, ids):
        """No crash tells of it, accept_length only falls: so the warning must name the remedy."""

        def shift(config, _tensors):
            place(config)[AUX] = ids

        directory = publish(project, make_eagle3(), shift)
        (line,) = lines(open_head(directory, target=target), "aux_layer_ids")
        assert line.warning and "off by one" in line.rule and "--set aux_layer_ids=2,3,4" in line.rule
        said = open_head(directory, target=target, overrides={"aux_layer_ids": (2, 3, 4)})
        assert said.head.config.aux_layer_ids == (2, 3, 4) and not lines(said, "aux_layer_ids")[0].warning

    def test_two_keys_that_disagree_are_refused(self, make_eagle3, publish, target):
        directory = publish("specforge", make_eagle3(), lambda config, _: config.update({AUX: [1, 2, 3]}))
        with pytest.raises(DraftDirError, match="which are different layers; give the right ones"):
            open_head(directory, target=target)

    def test_norm_output_means_two_things(self, make_eagle3, publish, target):
        """SpecForge writes true for what everybody calls false; only its user knows."""
        directory = publish("specforge", make_eagle3(), lambda config, _: config.update(norm_output=True))
        draft = open_head(directory, target=target)
        assert draft.head.config.norm_output and lines(draft, "norm_output")[0].warning
        assert not open_head(directory, target=target, overrides={"norm_output": False}).head.config.norm_output

    def test_rope_scaling_of_both_generations(self, make_eagle3, publish, target):
        """transformers 4: rope_theta beside rope_scaling; 5: rope_parameters."""
        scaled = {"type": "linear", "factor": 4.0}
        old = publish("specforge", make_eagle3(), lambda c, _: c.update(rope_theta=5e5, rope_scaling=scaled), "a")
        new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
        both = publish("specforge", make_eagle3(), lambda c, _: c.update(rope_parameters=new), "b")
        ropes = [open_head(path, target=target).head.config.rope_parameters for path in (old, both)]
        assert ropes == [new, new]


def broken(**changes):
    """An edit of config keys and tensors: None takes a tensor away."""

    def edit(config, tensors):
        for name, value in changes.items():
            if not isinstance(value, torch.Tensor) and name not in tensors:
                config[name] = value
            elif value is None:
                del tensors[name]
            else:
                tensors[name] = value

    return edit


REFUSED = [
    ({"midlayer.mlp.up_proj.weight": None}, "missing: midlayer.mlp.up_proj.weight"),
    ({"d2t": torch.zeros(160, dtype=torch.int64)}, "do not describe the same draft vocabulary"),
    ({"fc.weight": torch.zeros(64, 128)}, "wrong shape: fc.weight (64, 128) (expected (64, 192))"),
    ({"parallel_drafting": True}, "P-EAGLE"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_cannot_be_the_head_is_refused_with_the_cause(make_eagle3, publish, target, changes, says):
    """Each of these is served in silence by some engine."""
    directory = publish("specforge", make_eagle3(), broken(**changes))
    with pytest.raises((DraftDirError, WeightsError)) as caught:
        open_head(directory, target=target)
    assert says in str(caught.value) and str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 128}, None),  # copied from a target's config, as transformers writes it
        ({"sliding_window": 128, "layer_types": ["sliding_attention"]}, 128),
    ],
)
def test_a_sliding_window_is_served_where_it_is_stated(make_eagle3, publish, target, changes, window):
    """A head trained with a window falls apart when it sees more (1.08 at 20k tokens), and the other way round."""
    assert (
        open_head(publish("specforge", make_eagle3(), broken(**changes)), target=target).head.config.sliding_window
        == window
    )


class Loud:
    """A pickle that would run code when it is loaded."""

    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_with_code_is_not_executed(tmp_path, capsys):
    torch.save({"fc.weight": Loud()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="which are never loaded"):
        load_pickle(tmp_path / "pytorch_model.bin")
    assert "executed" not in capsys.readouterr().out


def test_an_embedding_of_its_own_is_refused(make_eagle3, publish, tiny_target, target):
    """The engine reads the target's: a head trained with another would draft nonsense."""
    close = tiny_target.embed_tokens.weight.detach().to(torch.bfloat16)
    copied = publish("specforge", make_eagle3(), broken(**{"embed_tokens.weight": close}), "copied")
    check_serves(copied, target)
    own = publish("specforge", make_eagle3(), broken(**{"embed_tokens.weight": torch.randn_like(close)}), "own")
    with pytest.raises(DraftDirError, match="embedding that differs from the target's"):
        load_engine(EngineConfig(draft=own, target=target))


def test_ids_and_output_rows_in_another_order_are_sorted_together(make_eagle3, publish, target, tiny_draft):
    """Such a head is valid; sorting the ids alone would give every row the logit of another token."""
    head, order = make_eagle3(), torch.randperm(160, generator=torch.Generator().manual_seed(0))

    def shuffle(_config, tensors):
        ids = tensors["d2t"] + torch.arange(160)
        tensors.update({"d2t": ids[order] - torch.arange(160), "lm_head.weight": tensors["lm_head.weight"][order]})

    shuffled = open_head(publish("specforge", head, shuffle), target=target)
    assert shuffled.token_map == tiny_draft.token_map
    assert torch.equal(shuffled.head.lm_head.weight, head.lm_head.weight)
