"""The benchmarks of recipes: the published one computes what it says, the commands make whole records, and the table of
few tokens, interrupted anywhere, goes on. One file: a process can found the group of its trainings only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from torch import Tensor

from toolkit.bench.records import read_record
from toolkit.data.batches import Example, collate, supervised_mask
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.jsonl import read_rows
from toolkit.recipe import load_recipe
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head
from toolkit.train.features import OnlineFeatures
from toolkit.train.trained_head import TrainedHead
from toolkit.train.training_data import read_data

DESIGNED = {"variant", "tokens", "seconds_per_step", "tokens_per_s", "peak_memory_bytes", "accept_length", "loss"}


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


def test_lagging_mask_stands_two_before_what_it_supervises(script) -> None:
    """Root t predicts x_{t+2}: the mask of the recipe misses A1 and goes one past the end, as SpecForge issue 885."""
    batch = collate([Example("a", list(range(9)), [False] * 3 + [True] * 6), Example("b", [1, 2], [False, True])], 0)
    mask = script("training_published").lagging_mask(batch)
    assert mask[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7] and not mask[1].any()
    exact = supervised_mask(batch.response, 0)[0]
    assert exact.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


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


def test_the_whole_command(script, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A variant that trained on other tokens, a budget that is not kept, or a row without its interval would make a
    false record. One process does it all here: peaks are then not each variant's own, and are not looked at."""
    training, out, forwards = script("training"), tmp_path / "record.json", []
    of_target = OnlineFeatures.__call__

    def counted(self, batch):
        forwards[-1] += 1
        return of_target(self, batch)

    def here(job):
        AcceleratorState._reset_state(reset_partial_state=True)
        forwards.append(0)
        return training.work(job)

    monkeypatch.setattr(OnlineFeatures, "__call__", counted)
    monkeypatch.setattr(training, "in_own_process", here)
    sizes = ["--tokens", "150", "--step-tokens", "40", "--steps", "1", "--max-tokens", "8", "--seeds", "3"]
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "train.optimizer.learning_rate=0.01"]
    monkeypatch.setattr(sys, "argv", ["training.py", *recipe, *sizes, "--out", str(out)])
    assert training.main() == 0
    record = read_record(out, "training")
    rows = record["rows"]
    assert all(set(row) >= DESIGNED for row in rows)
    stored = rows.pop(2)
    assert (stored["layout"], stored["variant"]) == ("rollouts", "ours, stored features")
    assert stored["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4), "the same step"
    assert forwards.pop(2) == 0 and all(forwards[:4]), "without the target's forward, which is in all other steps"
    assert [(row["layout"], row["variant"]) for row in rows] == [
        (layout, variant) for layout in ("rollouts", "one row", None) for variant in ("published", "ours")
    ]
    assert [row["tokens"] for row in rows[2:4]] == [40, 40]
    published, ours = rows[4:]
    assert published["tokens"] == ours["tokens"] >= 150 and published["steps"] == ours["steps"] > 1
    assert published["tokens"] - 150 < 2 * 17, "the budget ends with the batch that fills it"
    for row in (published, ours):
        low, high = row["interval"]
        assert 1 <= low <= row["accept_length"] <= high <= 5 and row["seed"] == 3 and row["verify_steps"] > 0
        assert 1 <= row["forecast"] <= 5 and row["num_steps"] == 4
    settings = record["settings"]["train"]
    assert (settings["published"]["learning_rate"], settings["ours"]["learning_rate"]) == (1e-4, 0.01)
    assert settings["published"]["ttt_curriculum"] == [] and settings["published"]["lm_head"] is None, "none of ours"
    shown = capsys.readouterr().out
    assert "accept_length" in shown and "one row" in shown


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks into /proc")
def test_a_killed_command_leaves_no_process_behind() -> None:
    """It would take the processor from whatever is measured next."""
    code = (
        "import multiprocessing, os, time; from concurrent.futures import ProcessPoolExecutor; import training_jobs\n"
        "pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), training_jobs.end_with_parent)\n"
        "print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 120).result()"
    )
    folder = Path(__file__).parents[2] / "benchmarks"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as command:
        worker = int(command.stdout.readline())
        assert not ended(worker)
        command.kill()
    until = time.monotonic() + 30
    while not ended(worker) and time.monotonic() < until:
        time.sleep(0.1)
    assert ended(worker)


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_row_longer_than_the_target_reads_is_refused(script, tiny_target, run_folder) -> None:
    """Positions past the context were never trained: their figures would be those of another forward."""
    data = read_data(
        load_recipe(run_folder / "recipe.yaml").train, run_folder / "rollouts/rollouts.jsonl", tiny_target, 0
    )
    with pytest.raises(ValueError, match="600 ids came, but the target reads at most 512"):
        script("training_jobs").joined(data, 600, 2, tiny_target.max_context)
    texts = script("training_jobs").joined(data, 50, 2, tiny_target.max_context).train
    assert [len(text.input_ids) for text in texts] == [50, 50]


@pytest.mark.process
def test_on_and_off_policy_differ_in_the_answers_alone(
    script, tiny_target_directory, monkeypatch, tmp_path, capsys, alone
) -> None:
    """The same prompts, held-out rows and token map; the file's answers word for word, and none taken for greedy."""
    measured, training = script("on_policy"), script("training")
    conversations, seen = tmp_path / "talks.jsonl", {}
    with conversations.open("w") as handle:
        for index in range(14):
            asked = {"role": "user", "content": f"what is {index}"}
            turns = [asked, {"role": "assistant", "content": f"it is {index} and one more thing to say"}]
            handle.write(json.dumps({"id": f"t{index}", "messages": [*turns, asked, turns[1]]}) + "\n")

    def here(job):
        AcceleratorState._reset_state(reset_partial_state=True)
        rows = [json.loads(line) for line in (job.run / "rollouts/rollouts.jsonl").read_text().splitlines()]
        seen[job.variant] = {row["id"]: row for row in rows}, (job.run / training_jobs.TOKEN_MAP).read_bytes()
        assert list((job.run / "features").glob("shard-*")), "stored before, for all trainings on that text"
        return training.work(job)

    training_jobs = script("training_jobs")
    monkeypatch.setattr(measured, "in_own_process", here)
    recipe = tmp_path / "recipe.yaml"
    data = {"global_batch": 2, "micro_batch": 2}
    train = {"precision": "fp32", "unroll": {"ttt_steps": 3}, "data": data}
    rollouts = {"max_tokens": 40, "held_out": 0.3, "temperature": 0.0}
    target = {"model": str(tiny_target_directory), "dtype": "float32"}
    recipe.write_text(yaml.safe_dump({"name": "tiny", "target": target, "rollouts": rollouts, "train": train}))
    out = tmp_path / "record.json"
    sizes = ["--tokens", "60", "--seeds", "1", "--max-tokens", "8", "token_map.size=200"]
    monkeypatch.setattr(
        sys, "argv", ["on_policy.py", str(conversations), "--recipe", str(recipe), *sizes, "--out", str(out)]
    )
    assert measured.main() == 0
    rows = read_record(out, "training")["rows"]
    assert [row["variant"] for row in rows] == ["off-policy", "on-policy"] and rows[0]["tokens"] >= 60
    assert all(1 <= row["accept_length"] <= 5 and row["verify_steps"] > 0 for row in rows)
    (given, given_map), (own, own_map) = seen["off-policy"], seen["on-policy"]
    assert given_map == own_map and list(given) == list(own)
    trained = [name for name, row in own.items() if row["split"] == "train"]
    assert 0 < len(trained) < len(own)
    for name, row in given.items():
        if name not in trained:
            assert row == own[name]
            continue
        assert row["messages"][-1]["content"] == f"it is {name[1:]} and one more thing to say"
        assert row["messages"][:-1] == own[name]["messages"][:-1] and len(row["messages"]) == 2
        assert row["provenance"]["temperature"] > 0 and row["provenance"]["target"] != own[name]["provenance"]["target"]
    assert "off-policy" in capsys.readouterr().out


def test_cut_off_and_continued(script, tiny_target, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A cell trained twice, one lost at an interruption, a row under another cell's name, a source whose files change,
    or a diverged training that looks like a good one would each make a false table."""
    few, cells = script("few_tokens"), script("training_cells")
    trained, cut_off = Counter(), SimpleNamespace(after=3)

    def here(wanted, at_once):
        assert at_once == 2
        for cell in wanted:
            if sum(trained.values()) == cut_off.after:
                raise KeyboardInterrupt
            AcceleratorState._reset_state(reset_partial_state=True)
            trained[cell.key[:4]] += 1
            yield cell, cells.trained(cell)

    monkeypatch.setattr(few, "in_processes", here)
    monkeypatch.setattr(few, "in_process_of_its_own", lambda call, *arguments: call(*arguments))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "record.json"
    before = sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*"))
    sources = [str(run_folder), f"file:{run_folder / 'rollouts/rollouts.jsonl'}"]
    sizes = ["--tokens", "260", "60", "--seeds", "1", "0", "--max-tokens", "8", "--jobs", "2"]
    chosen = [
        "--only",
        "ours",
        "too hot",
        "--variant",
        "too hot train.optimizer.learning_rate=1e30 train.head.init=copied",
        "--engine",
        "ours",
    ]
    kept = len(range(0, tiny_target.vocab_size, 2))
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), f"token_map.size={kept}"]
    command = ["few_tokens.py", *sources, *recipe, *sizes, *chosen, "--rows", str(rows), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        few.main()
    assert len(list(read_rows(rows))) == 3
    with rows.open("a") as handle:
        handle.write('{"torn')
    with pytest.raises(ValueError, match="is of .*rollouts.jsonl; call .* otherwise"):
        cells.prepare(tmp_path / "rows-sources" / "file", run_folder / "recipe.yaml", few.load_recipe(recipe[1]))
    with pytest.raises(ValueError, match=f"keeps {kept} ids, token_map.size is 100: set token_map.size={kept}"):
        smaller = few.load_recipe(recipe[1], ["token_map.size=100"])
        cells.prepare(tmp_path / "rows-sources" / "file", run_folder / "rollouts/rollouts.jsonl", smaller)
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    assert few.main() == 0 and sum(trained.values()) == 3, "out of minutes at once"
    monkeypatch.setattr(sys, "argv", command)
    cut_off.after = None
    assert few.main() == 0
    names = (run_folder.name, "file")
    variants = ("ours", "too hot")
    order = [(s, v, t, seed) for t in (60, 260) for seed in (1, 0) for s in names for v in variants]
    assert trained == Counter(order), "each once"
    monkeypatch.setattr(sys, "argv", [*command, "--show"])
    assert few.main() == 0 and sum(trained.values()) == len(order)
    assert before == sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*")), "sources are read only"
    record = read_record(out, "training")
    found = {(row["source"], row["variant"], row["asked_tokens"], row["seed"]): row for row in record["rows"]}
    assert list(found) == order and len(list(read_rows(rows))) == len(order)
    in_an_epoch = sum(11 + index - 6 for index in range(3, 12))  # supervised, of the nine that train
    for (_, variant, tokens, _), row in found.items():
        if variant == "too hot":
            assert "loss" in row["diverged"] and "forecast" not in row
            continue
        low, high = row["forecast_interval"]
        assert 1 <= low <= row["forecast"] <= high <= 5 and row["diverged"] is None
        assert row["commit"] == record["commit"] and row["start_tokens"] == in_an_epoch + 9, "the start read them all"
        assert tokens <= row["tokens"] < tokens + 2 * 17
        assert row["unique_tokens"] == (in_an_epoch if tokens == 260 else row["tokens"]), "260 are two epochs"
        assert row["verify_steps"] > 0 and 1 <= row["accept_length"] <= 5
    assert found["file", "ours", 60, 0]["forecast_verify_steps"] > 0
    (cell,) = (one for one in record["cells"] if (one["source"], one["tokens"], one["variant"]) == ("file", 60, "ours"))
    pair = [found["file", "ours", 60, seed]["forecast"] for seed in (0, 1)]
    assert cell["forecast"]["mean"] == pytest.approx(sum(pair) / 2) and cell["forecast"]["seeds"] == 2
    assert cell["forecast"]["spread"] == pytest.approx(abs(pair[0] - pair[1]) / 2**0.5)
    shown = capsys.readouterr().out
    assert "2 diverged" in shown and "260 tokens" in shown


def test_what_a_cell_s_row_depends_on(script, run_folder, monkeypatch) -> None:
    """A row of other settings, of a default as it was before, or of another trainer must not stand for today's; what
    ends a training or measures within it must not train every cell anew."""
    cells, jobs = script("training_cells"), script("training_jobs")

    def digests(*overrides: str) -> dict[str, str]:
        recipe = load_recipe(run_folder / "recipe.yaml", overrides)
        made = [jobs.Job(name, recipe, run_folder, 60, None, 0, 0, 8, 1) for name in jobs.TRAINERS]
        return {job.variant: cells.cell_of("source", job).digest for job in made}

    before = digests()
    assert before == digests(
        "train.epochs=9", "train.max_steps=7", "train.evaluation.eval_every=3", "train.evaluation.real_every=null"
    )
    assert not set(before.values()) & set(
        digests("train.optimizer.warmup_ratio=0.5", "train.data.max_length=99").values()
    )
    assert not set(before.values()) & set(digests("target.dtype=bfloat16").values())

    def changed(now: dict[str, str]) -> list[str]:
        return [name for name, digest in now.items() if digest != before[name]]

    faded = changed(digests("train.unroll.step_decay=0.7"))
    assert faded == ["ours", "fading features"], "the published one states its own"
    monkeypatch.setattr(script("training_features"), "WEIGHT", 1.0)
    monkeypatch.setitem(script("training_published").PUBLISHED["optimizer"], "max_grad_norm", 1.0)
    assert changed(digests()) == ["published", "fading features"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--variant", "small target.dtype=float32"], "target.dtype=float32 is no setting of the training"),
        (["--engine", "our"], "no variant is called our; there are published, ours"),
        (["--only", "our"], "no variant is called our"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(script, run_folder, monkeypatch, capsys, more, said) -> None:
    monkeypatch.setattr(sys, "argv", ["few_tokens.py", str(run_folder), *more])
    with pytest.raises(SystemExit) as refused:
        script("few_tokens").arguments()
    assert said in f"{refused.value} {capsys.readouterr().err}"


def test_rows_of_several_machines_are_told(script, capsys) -> None:
    script("few_tokens").warn_of_mixed([{"commit": "a", "machine": "x"}, {"commit": "a"}])
    assert capsys.readouterr().err == "warning: rows of several machines stand side by side: unknown, x\n"


@pytest.mark.process
def test_cells_in_processes(script, run_folder, tmp_path, capfd, monkeypatch, alone) -> None:
    """One whose run folder is gone must neither end the table nor leave a row; another's row is its own."""
    for name in set(os.environ) - set(alone):
        monkeypatch.delenv(name)  # of a training in this process
    cells, jobs = script("training_cells"), script("training_jobs")
    overrides = ["train.data.features=online", "rollouts.keep_features=false"]
    recipe = load_recipe(run_folder / "recipe.yaml", overrides)
    good, gone = (
        cells.Cell(folder.name, jobs.Job("ours", recipe, folder, 60, None, 0, 0, 8, 1), folder.name)
        for folder in (run_folder, tmp_path / "absent")
    )
    rows = {cell.source: row for cell, row in cells.in_processes([good, gone], 2)}
    assert rows.pop("absent") is None and "absent" in capfd.readouterr().err
    ((source, row),) = rows.items()
    assert source == row["source"] == row["digest"] == run_folder.name
    assert row["asked_tokens"] == 60 <= row["tokens"] and row["diverged"] is None and row["machine"]


def test_the_built_in_variants_are_settings_of_the_demo_recipe(script) -> None:
    """One that a recipe refuses, or that changes nothing, would be found hours into the table."""
    few = script("few_tokens")
    settings = {name: load_recipe(few.DEMO_RECIPE, changes).train for name, changes in few.VARIANTS.items()}
    assert len({repr(one) for one in settings.values()}) == len(settings) - 2, "two are other trainers"
    assert set(few.ENGINE) <= set(settings)


def test_the_feature_loss_fades_and_is_gone(script, run_folder, tmp_path, alone) -> None:
    """Its gradient has to be there at the start; at a weight of 0 the head is that of `ours` to the bit."""
    features = script("training_features")
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = load_recipe(run_folder / "recipe.yaml", ["train.data.features=online", "rollouts.keep_features=false"])
    files = [run_folder / "rollouts/rollouts.jsonl", run_folder / "token_map/token_map.safetensors"]
    trainer = features.FadingFeaturesTrainer(recipe, *files, tmp_path / "train")
    trainer.steps = 4
    batch = trainer.side.inputs(trainer._collate([0, 1]), 3)
    rows = trainer.side.teacher(batch.teacher_hidden, batch.written, batch.greedy)
    choice, ones = trainer.side.token_map.to_draft(rows.choice), torch.ones(3)
    module, found = trainer.model.module, []
    for weight in (1.0, 0.0):
        module.weight = weight
        loss, by_step, _ = module(batch.aux, batch.embeds, batch.supervision, rows, choice, ones)
        found.append((loss.item(), by_step, torch.autograd.grad(loss, module.head.fc.weight)[0]))
    plain = TrainedHead(module.head, recipe.train.unroll.step_decay)(
        batch.aux, batch.embeds, batch.supervision, rows, choice, ones
    )
    assert found[1][0] == plain[0].item() < found[0][0] and torch.equal(found[0][1], plain[1])
    assert not torch.allclose(found[0][2], found[1][2])
    weights = []
    for step in range(4):
        trainer.optimise(step, [0, 1])
        weights.append(module.weight)
    assert weights == [10.0, 5.0, 0.0, 0.0]
