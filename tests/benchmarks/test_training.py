"""The training benchmarks on a tiny target: the published recipe is what it says, and the commands make their records.
One file: a process can found the group of its trainings only once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from torch import Tensor

from toolkit.bench.records import read_record
from toolkit.data.batches import Example, collate
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.recipe import load_recipe
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head


@pytest.fixture(scope="module")
def run_folder(tiny_target, tiny_target_directory, tmp_path_factory) -> Path:
    """Rollouts of random ids, a token map, and the recipe of a run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rollouts").mkdir()
    generator = torch.Generator().manual_seed(0)
    with (folder / "rollouts" / "rollouts.jsonl").open("w") as handle:
        for index in range(12):
            ids = torch.randint(3, tiny_target.vocab_size, (12 + index,), generator=generator).tolist()
            split = "held_out" if index < 3 else "train"
            row = {"id": f"r{index:02}", "input_ids": ids, "response_spans": [[6, len(ids)]], "split": split}
            handle.write(json.dumps(row) + "\n")
    half = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    save_token_map(folder / "token_map" / "token_map.safetensors", half)
    data = {"global_batch": 2, "micro_batch": 2, "features": "offline"}
    unroll = {"ttt_steps": 3, "curriculum": [0.5]}
    recipe = {
        "name": "tiny",
        "target": {"model": str(tiny_target_directory), "dtype": "float32"},
        "run_dir": str(folder),
        "rollouts": {"keep_features": True},
        "train": {"precision": "fp32", "data": data, "unroll": unroll, "head": {"lm_head": "frozen"}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def specforge_loss(
    head: Eagle3Head, token_map: TokenMap, aux: Tensor, embeds: Tensor, scores: Tensor, mask: Tensor, steps: int
) -> Tensor:
    """SpecForge's EAGLE-3 loss of one row of L ids, from its description: aux [L, 3H], embeds [L, H] and scores [L, V]
    of the target at each position, mask [L] of the assistant's ids. The sum over L, not the mean.

    Targets and embeddings are shifted once before the first step, the mask is not. Then all three after each step:

        step k, root t    reads e_{t+1+k}    target p_{t+1+k}, the distribution of x_{t+2+k}    mask m_{t+k}
    """
    weight, config, layer = dict(head.named_parameters()), head.config, "midlayer."
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        x = (x @ weight[f"{layer}self_attn.{name}.weight"].T).unflatten(-1, (-1, config.head_dim))
        return x.repeat_interleave(config.num_attention_heads // x.shape[1], dim=1)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
        low, high = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-high, low), dim=-1) * angles.sin()

    def shift(x: Tensor) -> Tensor:
        return torch.cat((x[1:], torch.zeros_like(x[:1])))

    embeds, scores, total = shift(embeds), shift(scores), torch.zeros(())
    hidden, keys, values = aux @ weight["fc.weight"].T, [], []
    for step in range(steps):
        x = torch.cat((norm(embeds, layer + "input_layernorm"), norm(hidden, layer + "hidden_norm")), dim=-1)
        positions = torch.arange(len(x)) + step
        keys.append(rotated(heads(x, "k_proj"), positions))
        values.append(heads(x, "v_proj"))
        attended = []
        for root, query in enumerate(rotated(heads(x, "q_proj"), positions)):
            # The first step's ids up to the root, then the root's own later steps.
            seen, told = ([*kept[0][: root + 1], *(later[root] for later in kept[1:])] for kept in (keys, values))
            shares = ((query * torch.stack(seen)).sum(-1) / config.head_dim**0.5).softmax(0)
            attended.append((shares[..., None] * torch.stack(told)).sum(0).flatten())
        hidden = hidden + torch.stack(attended) @ weight[layer + "self_attn.o_proj.weight"].T
        gate, up, down = (weight[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        x = norm(hidden, layer + "post_attention_layernorm")
        hidden = hidden + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
        logits = norm(hidden, "norm") @ weight["lm_head.weight"].T
        target_p = scores[:, token_map.t2d].softmax(-1)
        position_mask = token_map.t2d[scores.argmax(-1)] & mask
        total = total - 0.8**step * (position_mask[:, None] * target_p * logits.log_softmax(-1)).sum()
        embeds, scores, mask = shift(embeds), shift(scores), shift(mask)
    return total


def test_published_loss_is_specforge_s(script, tiny_target, run_folder) -> None:
    """Another attention, teacher, weight of a step, mask or alignment in the published recipe would make a straw man of
    it. Loss and gradients are those of SpecForge's description, summed over rows without padding, over B*L."""
    published = script("training_published")
    settings = published.published_settings(load_recipe(run_folder / "recipe.yaml").train)
    token_map = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    head = start_head(plan_head(settings, tiny_target, token_map), settings, tiny_target, seed=0)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, tiny_target.vocab_size, (length,), generator=generator).tolist() for length in (9, 14)]
    batch = collate([Example(str(len(one)), one, [at > 3 for at in range(len(one))]) for one in ids], 2)
    with torch.no_grad():
        told = tiny_target.model(batch.input_ids, output_hidden_states=True)
        embeds = tiny_target.model.get_input_embeddings()(batch.input_ids)
    aux = torch.cat([told.hidden_states[layer] for layer in head.config.aux_layer_ids], dim=-1)
    ours = published.PublishedHead(head, 3, settings.unroll.step_decay, token_map.t2d)(
        aux, embeds, told.logits, published.lagging_mask(batch)
    )
    theirs = torch.zeros(())
    for row, one in enumerate(ids):
        mask = torch.tensor([3 < at < len(one) - 1 for at in range(len(one))])
        given = (part[row, : len(one)] for part in (aux, embeds, told.logits))
        theirs = theirs + specforge_loss(head, token_map, *given, mask, 3) / batch.input_ids.numel()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5) and theirs.item() > 1
    gradients = (torch.autograd.grad(loss, list(head.parameters())) for loss in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def alone():
    """The environment without the group of one that trainings in this process found. It ends behind the last of them:
    trainings that later tests start would take over its variables, and with them a port that is in use."""
    before = dict(os.environ)
    yield before
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def test_training_steps(script, run_folder, monkeypatch, tmp_path, alone) -> None:
    """One process does it all here."""
    training, out = script("training"), tmp_path / "record.json"

    def here(job):
        AcceleratorState._reset_state(reset_partial_state=True)
        return training.work(job)

    monkeypatch.setattr(training, "in_own_process", here)
    sizes = ["--recipe", str(run_folder / "recipe.yaml"), "--step-tokens", "40", "--steps", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["training.py", *sizes, "--out", str(out)])
    assert training.main() == 0
    rows = read_record(out, "training")["rows"]
    assert [row["variant"] for row in rows] == ["published", "ours", "ours, stored features", "published", "ours"]
    assert rows[2]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4), "the same step"


def test_few_tokens(script, run_folder, monkeypatch, tmp_path, alone) -> None:
    """The rate is chosen by the validation half; the test half sees the chosen head alone; nothing is done twice."""
    few, done = script("few_tokens"), []

    def here(wanted, at_once):
        for cell in wanted:
            AcceleratorState._reset_state(reset_partial_state=True)
            done.append(cell.key)
            yield cell, few.trained(cell)

    monkeypatch.setattr(few, "in_processes", here)
    monkeypatch.setattr(few, "in_process_of_its_own", lambda call, *arguments: call(*arguments))
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "train.optimizer.name=adamw", "--tokens", "60"]
    recipe += ["--only", "ours"]
    sizes = ["--seeds", "1", "--max-tokens", "8", "--rates", "1e-3", "1e-2", "--muon-rates", "1", "2"]
    out = tmp_path / "record.json"
    paths = ["--warmups", "0.1", "--rows", str(tmp_path / "rows.jsonl"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["few_tokens.py", f"run:{run_folder}", *recipe, *sizes, *paths])
    assert few.main() == 0
    record = read_record(out, "training")
    over = [row for row in record["rows"] if row["seed"] is None]
    assert [(row["variant"], row["tries"]) for row in over] == [("ours", 2)]
    for row in over:
        tried = [one for one in record["rows"] if (one["variant"], one["split"]) == (row["variant"], "validation")]
        assert row["learning_rate"] == max(tried, key=lambda one: one["forecast"])["learning_rate"]
    assert len(done) == len(set(done)) == 3
    assert few.main() == 0 and len(done) == 3
