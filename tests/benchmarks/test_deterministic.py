"""The scripts about equal bits, on a tiny target: what their record says, and which operation they name."""

from __future__ import annotations

import random

from tests.conftest import build_target
from toolkit.bench.records import read_record
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams


def test_the_record_of_schedules(script, draft_directory, tmp_path):
    """A row for each schedule with the option and without; with it nothing may be unequal."""
    out = tmp_path / "record.json"
    words = ["--draft", str(draft_directory), "--dtype", "bfloat16", "--limit", "4", "--max-tokens", "9"]
    chosen = ["preempted", "prefix reuse", "tree 4,4,16"]
    arguments = [*words, "--repeats", "1", "--out", str(out), "--schedules", *chosen]
    assert script("deterministic").main(arguments) == 0
    rows = read_record(out, "deterministic")["rows"]
    assert [(row["schedule"], row["deterministic"]) for row in rows] == [(n, f) for n in chosen for f in (False, True)]
    assert all(row["equal"] == row["requests"] == 4 and not row["unequal"] for row in rows if row["deterministic"])
    assert rows[3]["cached_tokens"] and all(row["cost"] > 0 for row in rows)


def test_the_operation_that_differs_is_named(script, tiny_draft):
    """An activation that rounds by the number of rows is the source; what follows from it is none."""
    tool, target = script("bit_sources"), build_target()
    act, prompt = target.layers[1].mlp.act_fn, [random.Random(0).randrange(1, 200) for _ in range(20)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    alone, drafting = (
        Engine(target, draft, shape, max_running_requests=1, deterministic=True)
        for draft, shape in ((None, None), (tiny_draft, DraftShape.chain(4)))
    )
    _, first_trace = tool.traced(alone, [prompt], params)
    own = act.forward
    act.forward = lambda x: own(x) if x[..., 0].numel() != 5 else own(x) * (1 + 2**-20)
    _, second_trace = tool.traced(drafting, [prompt], params)
    found, first = tool.sources(first_trace, second_trace)
    assert first == f"{type(act).__name__} (layers.1.mlp.act_fn), token 20"
    assert set(found) == {type(act).__name__} and found[type(act).__name__] >= 7
