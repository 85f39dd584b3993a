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


def test_steps_of_every_variant(script, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A variant that stepped on other ids, or the target's forward in a step of stored features, would make a false
    record. One process does it all here: peaks are then not each variant's own, and are not looked at."""
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
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "train.optimizer.learning_rate=0.01"]
    sizes = ["--step-tokens", "40", "--steps", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["training.py", *recipe, *sizes, "--out", str(out)])
    assert training.main() == 0
    record = read_record(out, "training")
    rows = record["rows"]
    assert all(set(row) >= DESIGNED for row in rows) and len(rows) == 5
    stored = rows[2]
    assert (stored["layout"], stored["variant"]) == ("rollouts", "ours, stored features")
    assert stored["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4), "the same step"
    assert forwards.pop(2) == 0 and all(forwards[:4]), "without the target's forward, which is in all other steps"
    assert [(row["layout"], row["variant"]) for row in rows[:2] + rows[3:5]] == [
        (layout, variant) for layout in ("rollouts", "one row") for variant in ("published", "ours")
    ]
    assert [row["tokens"] for row in rows[3:5]] == [40, 40]
    settings = record["settings"]["train"]
    assert settings["published"]["optimizer"] == "adamw" and settings["published"]["lm_head"] is None, "none of ours"
    assert "one row" in capsys.readouterr().out


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
        script("training").joined(data, 600, 2, tiny_target.max_context)
    texts = script("training").joined(data, 50, 2, tiny_target.max_context).train
    assert [len(text.input_ids) for text in texts] == [50, 50]


TRIED = ("learning_rate", "warmup_ratio")


def same_group(one: dict, other: dict) -> bool:
    return all(one[name] == other[name] for name in ("source", "asked_tokens", "variant"))


def test_cut_off_and_continued(script, tiny_target, run_folder, monkeypatch, tmp_path, capsys, alone) -> None:
    """A cell trained twice, one lost at an interruption, a row under another cell's name, a source whose files change,
    a test of a try that validation did not choose, a head that is not the one that was trained, a start that reads more
    than the training, or a diverged training that looks like a good one would each make a false table."""
    few, cells = script("few_tokens"), script("training_cells")
    done, cut_off = Counter(), SimpleNamespace(after=3)

    def here(wanted, at_once):
        assert at_once == 2
        for cell in wanted:
            if sum(done.values()) == cut_off.after:
                raise KeyboardInterrupt
            AcceleratorState._reset_state(reset_partial_state=True)
            heads = cell.job.head.parent
            kept, before = cell.job.head.is_file(), sorted(heads.glob("*"))
            assert kept == (cell.job.split == "test"), "trained once, then tested"
            done[cell.key[:-1]] += 1
            yield cell, cells.trained(cell)
            assert not kept or sorted(heads.glob("*")) == before

    monkeypatch.setattr(few, "in_processes", here)
    monkeypatch.setattr(few, "in_process_of_its_own", lambda call, *arguments: call(*arguments))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "record.json"
    before = sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*"))
    sources = [f"file:{run_folder / 'rollouts/rollouts.jsonl'}"]
    sizes = ["--tokens", "260", "60", "--seeds", "1", "--max-tokens", "8", "--jobs", "2"]
    tries = ["--rates", "1e-3", "1e30", "--muon-rates", "0.01", "0.02", "--warmups", "0.1"]
    kept = len(range(0, tiny_target.vocab_size, 2))
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), f"token_map.size={kept}", "train.optimizer.name=adamw"]
    command = ["few_tokens.py", *sources, *recipe, *sizes, *tries, "--rows", str(rows), "--out", str(out)]
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
    assert few.main() == 0 and sum(done.values()) == 3, "out of minutes at once"
    monkeypatch.setattr(sys, "argv", command)
    cut_off.after = None
    assert few.main() == 0
    assert set(done.values()) == {1}, "each once"
    amounts = [key[2] for key in done]
    assert amounts == sorted(amounts), "few tokens first"
    monkeypatch.setattr(sys, "argv", [*command, "--show"])
    count = sum(done.values())
    assert few.main() == 0 and sum(done.values()) == count
    assert before == sorted((file, file.stat().st_mtime_ns) for file in run_folder.rglob("*")), "sources are read only"
    record = read_record(out, "training")
    elsewhere = ["--rows", str(tmp_path / "other.jsonl"), "--features", str(tmp_path / "rows-sources")]
    again = [*elsewhere, "--continues", str(out), "--out", str(tmp_path / "again.json")]
    monkeypatch.setattr(sys, "argv", [*command[: command.index("--rows")], *again])
    assert few.main() == 0 and sum(done.values()) == count, "the record's rows are done"
    assert read_record(tmp_path / "again.json")["rows"] == record["rows"]
    tests = [row for row in record["rows"] if row["split"] == "test" and row["seed"] is not None]
    validation = [row for row in record["rows"] if row["split"] == "validation"]
    assert len(tests) + len(validation) == count == 2 * 2 * (2 + 1), "two rates and a test each"
    assert all(row["diverged"] for row in validation if (row["variant"], row["learning_rate"]) == ("ours", 1e30))
    in_an_epoch = sum(11 + index - 6 for index in range(3, 12))  # supervised, of the nine that train
    for row in tests:
        tried = [one for one in validation if same_group(one, row) and one["diverged"] is None]
        won = max(tried, key=lambda one: one["forecast"])
        assert [row[name] for name in TRIED] == [won[name] for name in TRIED] and row["diverged"] is None
        low, high = row["forecast_interval"] or (1, 5)
        assert 1 <= low <= row["forecast"] <= high <= 5
        assert row["asked_tokens"] <= row["tokens"] < row["asked_tokens"] + 2 * 17
        assert row["unique_tokens"] == (in_an_epoch if row["asked_tokens"] == 260 else row["tokens"])
        of_answers = row["unique_tokens"] + 9  # each answer has one more than are supervised
        assert row["start_tokens"] == 0 if row["variant"] == "published" else 60 <= row["start_tokens"] <= of_answers
        assert row["seconds"] == pytest.approx(row["start_seconds"] + row["steps"] * row["seconds_per_step"])
        assert row["verify_steps"] > 0 and 1 <= row["accept_length"] <= 5 and len(row["by_prompt"]) == 1
    over = [row for row in record["rows"] if row["seed"] is None]
    assert len(over) == 2 * 2 and {row["tries"] for row in over} == {2}
    for row in over:
        (mine,) = (one for one in tests if same_group(one, row))
        assert row["seeds"] == [1] and row["accept_length"] == pytest.approx(mine["accept_length"])
        assert row["forecast"] == pytest.approx(mine["forecast"])
        assert (row["forecast_ratio"] is None) == (row["variant"] == "published")
    shown = capsys.readouterr().out
    assert "260 tokens" in shown and "over published" in shown


def test_what_is_trained_and_tested_follows_the_validation_half(script, run_folder, monkeypatch) -> None:
    """Rates first, the best one's warm-ups, its other seeds, its tests: with rows whose test half would prefer another
    try, and a rate that diverged. Another try asked for later is one more, and its tests are others."""
    few = script("few_tokens")
    forecasts = {(1e-3, 0.1): 1.3, (1e-2, 0.1): 1.5, (1e-2, 0.5): 1.4}

    def plan_of(*more: str):
        command = ["few_tokens.py", str(run_folder), "--recipe", str(run_folder / "recipe.yaml"), "--seeds", "3", "4"]
        tries = ["--rates", "1e-3", "1e-2", "1", "--muon-rates", "1", "2", "3", "--warmups", "0.1", "0.5"]
        monkeypatch.setattr(sys, "argv", [*command, *tries, "--only", "published", *more])
        return few.Plan(few.arguments(), {"source": run_folder})

    def row_of(cell) -> dict:
        source, variant, tokens, seed, rate, warmup, split, digest = cell.key
        row = {"source": source, "variant": variant, "asked_tokens": tokens, "seed": seed, "learning_rate": rate}
        row |= {"warmup_ratio": warmup, "split": split, "digest": digest}
        found = forecasts.get((rate, warmup))
        return row | {"forecast": found, "diverged": None if found else "the loss is inf"}

    def run(plan, rows: list[dict]) -> list[list[tuple]]:
        batches = []
        while cells := plan.missing(60, plan.known(rows)):
            batches.append([(*cell.key[3:7],) for cell in cells])
            rows += [row_of(cell) for cell in cells]
            assert all(cell.known["forecast"] == 1.5 for cell in cells if cell.job.split == "test")
        return batches

    rows = [{"source": "source", "variant": "published", "asked_tokens": 60, "forecast": 9.0}]  # of an older program
    assert run(plan_of(), rows) == [
        [(3, 1e-3, 0.1, "validation"), (3, 1e-2, 0.1, "validation"), (3, 1.0, 0.1, "validation")],
        [(3, 1e-2, 0.5, "validation")],
        [(4, 1e-2, 0.1, "validation")],
        [(3, 1e-2, 0.1, "test"), (4, 1e-2, 0.1, "test")],
    ]
    assert run(plan_of(), rows) == []
    screened: list[dict] = []
    assert run(plan_of("--screen"), screened) == [
        [(3, 1e-3, 0.1, "validation"), (3, 1e-2, 0.1, "validation"), (3, 1.0, 0.1, "validation")],
        [(3, 1e-2, 0.5, "validation")],
    ], "nothing is tested"
    forecasts |= {(2e-2, 0.1): 1.5, (2e-2, 0.5): 1.6}
    wider = plan_of("--rates", "1e-2", "2e-2", "--muon-rates", "1", "2")
    assert run(wider, rows) == [[(3, 2e-2, 0.1, "validation")]], "no better: nothing is tested again"


def test_what_a_cell_s_row_depends_on(script, run_folder, monkeypatch) -> None:
    """A row of other settings, of a default as it was before, or of another trainer must not stand for today's; what
    ends a training or measures within it must not train every cell anew, nor what is tried."""
    few, folders = script("few_tokens"), {"source": run_folder}

    def digests(*overrides: str) -> dict[str, str]:
        monkeypatch.setattr(
            sys, "argv", ["few_tokens.py", str(run_folder), "--recipe", str(run_folder / "recipe.yaml"), *overrides]
        )
        plan = few.Plan(few.arguments(), folders)
        return {name: plan.cell("source", 60, name, 0, 1e-3, 0.1, "test").digest for name in few.VARIANTS}

    before = digests()
    idle = ("train.epochs=9", "train.max_steps=7", "train.evaluation.eval_every=3", "train.evaluation.real_every=null")
    assert before == digests(*idle, "train.optimizer.warmup_ratio=0.5", "--rates", "1", "--muon-rates", "2")

    def changed(now: dict[str, str]) -> list[str]:
        return [name for name, digest in now.items() if digest != before[name]]

    assert changed(digests("train.data.max_length=99")) == changed(digests("target.dtype=bfloat16")) == [*before]
    assert changed(digests("train.unroll.step_decay=0.7")) == ["ours"], "the published one states its own"
    assert changed(digests("train.data.supervise=all")) == ["ours"], "the published one learns from answers"
    monkeypatch.setitem(script("training_published").PUBLISHED["optimizer"], "max_grad_norm", 1.0)
    assert changed(digests()) == ["published"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--variant", "small target.dtype=float32"], "target.dtype=float32 is no setting of the training"),
        (["--only", "our"], "no variant is called our; there are published, ours"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--rates", "1", "2"], "2 --rates, 4 --muon-rates"),
        (["--variant", "hot train.optimizer.warmup_ratio=0.3"], "warmup_ratio=0.3 is chosen by validation"),
        (["--variant", "hot train.optimizer.muon_learning_rate=1"], "muon_learning_rate=1 is chosen by validation"),
        (
            ["--variant", "b train.head.kind=block train.unroll.ttt_steps=3"],
            "3 trains shorter blocks than the chain of 4",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(script, run_folder, monkeypatch, capsys, more, said) -> None:
    few = script("few_tokens")
    recipe = ["--recipe", str(run_folder / "recipe.yaml")]
    monkeypatch.setattr(sys, "argv", ["few_tokens.py", str(run_folder), *recipe, *more])
    with pytest.raises(SystemExit) as refused:
        few.Plan(few.arguments(), {})
    assert said in f"{refused.value} {capsys.readouterr().err}"


@pytest.mark.process
def test_cells_in_processes(script, run_folder, tmp_path, capfd, monkeypatch, alone) -> None:
    """One whose run folder is gone must neither end the table nor leave a row; another's row is its own."""
    for name in set(os.environ) - set(alone):
        monkeypatch.delenv(name)  # of a training in this process
    cells, jobs = script("training_cells"), script("training_jobs")
    overrides = ["train.data.features=online", "rollouts.keep_features=false"]
    recipe = load_recipe(run_folder / "recipe.yaml", overrides)
    good, gone = (
        cells.Cell(folder.name, jobs.Job("ours", recipe, folder, 60, None, 0, 8, 1), folder.name)
        for folder in (run_folder, tmp_path / "absent")
    )
    rows = {cell.source: row for cell, row in cells.in_processes([good, gone], 2)}
    assert rows.pop("absent") is None and "absent" in capfd.readouterr().err
    ((source, row),) = rows.items()
    assert source == row["source"] == row["digest"] == run_folder.name
    assert row["asked_tokens"] == 60 <= row["tokens"] and row["diverged"] is None and row["machine"]
