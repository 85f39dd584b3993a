"""Two ranks write what one process writes: families of targets, kinds of heads, shapes, batches."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.process
CHAIN, TREE = "4,1,5", "3,3,10"
ALL = [(shape, 0.0, count) for shape in (None, CHAIN, TREE) for count in (1, 4)] + [(TREE, 1.0, 4)]
CASES = {  # target, kind of head (None: plain), changed sizes of the head, whether a token map narrows it
    "llama": ("llama", "eagle3", {}, False),
    "gemma2": ("gemma2", "eagle3", {}, False),
    "olmo2": ("olmo2", None, {}, False),  # its queries are normed across heads
    "eagle2, target's output in parts": ("llama", "eagle2", {}, False),
    "mtp, rows of the whole output": ("llama", "mtp", {}, True),
    "dspark": ("llama", "dspark", {}, False),
    "a head that does not divide": (
        "llama",
        "eagle3",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 97, "draft_vocab_size": 19},
        False,
    ),
    "a vocabulary that does not divide": ("llama-odd", "eagle3", {}, False),
    "experts": ("mixtral", None, {}, False),
    "no plan": ("gpt2", None, {}, False),
}
REFUSED = {
    "experts": r"\(mixtral\) cannot be divided.*layers\.\*\.mlp\.experts: moe_tp_experts",
    "no plan": r"\(gpt2\) cannot be divided.*no plan",
}

RECORDED = {  # options, in how many of three attempts rank 1 fails
    "recorded": ({"shape": TREE}, 0),
    "recorded, adaptive": ({"shape": TREE, "adaptive": True}, 0),
    "recorded but for what one rank cannot record": ({"shape": TREE}, 2),
}


@pytest.fixture(scope="module")
def work(family, head_for, prompts, tmp_path_factory):
    """What both ranks open and ask, by the case's name."""
    found = {}
    for name, (target, kind, sizes, narrowed) in CASES.items():
        options = {"target": family(target), "max_running_requests": 4, "device": "cpu"}
        if kind is not None:
            options |= {"draft": head_for(kind, target, **sizes), "shape": TREE}
        if narrowed:
            path = tmp_path_factory.mktemp("map") / "freq_19.pt"
            torch.save(torch.arange(3, 22), path)
            options["token_map"] = str(path)
        asks = ALL if name == target and kind else [(options.get("shape"), 0.0, 4)]
        found[name] = {"options": options, "prompts": prompts, "asks": asks}
    for name, (options, fails) in RECORDED.items():
        options |= {"target": family("llama"), "draft": head_for("eagle3", "llama"), "device": "cpu"}
        # Of four prompts two join when others have left.
        options |= {"max_running_requests": 2, "chunked_prefill_size": 16, "verify": "target"}
        asks = [(TREE, 0.0, 4), (CHAIN, 1.0, 4)]
        found[name] = {"options": options, "prompts": prompts, "asks": asks, "fails": fails}
    return found


@pytest.fixture(scope="module")
def by_ranks(work, here, tmp_path_factory):
    """What each of two ranks answers, by the case's name."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(here.parents[2])}
    command = [sys.executable, str(here / "rank_at_work.py"), str(folder / "work.json")]
    outputs = [folder / f"answers-{rank}.json" for rank in range(2)]
    running = [
        subprocess.Popen([*command, str(rank), str(outputs[rank])], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    return [json.loads(path.read_text(encoding="utf-8")) for path in outputs]


@pytest.fixture(scope="module")
def alone(here):
    """What one process answers."""
    spec = importlib.util.spec_from_file_location("rank_at_work", here / "rank_at_work.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda case: module.answers(case, None)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_tokens_are_those_of_one_process(name, work, by_ranks, alone):
    """Parts of a wrong width or in a wrong order, a bias added twice, a sum that is missing: other tokens. The caches
    hold half of the key heads, unless the family gathers them or the head does not divide."""
    wanted = alone(work[name])
    for found in (ranks[name] for ranks in by_ranks):
        assert found["tokens"] == wanted["tokens"]
        assert found["accepted"] == wanted["accepted"]
        gathered = name == "olmo2"
        assert found["key_heads"] == [heads if gathered else max(1, heads // 2) for heads in wanted["key_heads"]]
        assert found["pages"] == by_ranks[0][name]["pages"]
    if CASES[name][1] is not None:
        assert wanted["accepted"] > 0, "no draft was ever accepted: only roots were looked at"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_ranks_write_what_one_eager_process_writes(name, work, by_ranks, alone):
    """The sums over ranks are in the recording. What rank 1 cannot record runs eagerly on rank 0 too, which would else
    be in another collective."""
    wanted, one, two = alone(work[name]), *(ranks[name] for ranks in by_ranks)
    assert one == two
    assert one["tokens"] == wanted["tokens"]
    if "adaptive" not in name:  # what it drafts depends on the clock
        assert one["accepted"] == wanted["accepted"] > 0
    assert one["parts"] and (one["eager_rounds"] > 0) == (work[name]["fails"] > 0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name, by_ranks):
    """Half a head would answer wrongly, or the engine would fail somewhere in the middle."""
    for ranks in by_ranks:
        assert re.search(REFUSED[name], ranks[name]["refused"])
