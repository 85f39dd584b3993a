"""The roofline harness on tiny random models: that all of it runs, what it counts, and what it says. No times."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch

from toolkit.bench.records import read_record
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.request.errors import EngineError

DESIGNED = {
    "engine", "version", "weight_bits", "batch", "context", "tokens", "seconds", "tokens_per_s", "accept_length",
    "peak_memory_bytes", "parts",
}  # fmt: skip
OURS = [f"ours-{what}-{how}" for how in ("eager", "graph", "compiled") for what in ("plain", "chain", "tree")]
PARTS = {"draft", "build", "verify", "sample", "compact", "host"}


def test_the_whole_script(script, tmp_path, capsys) -> None:
    """On a card minutes are dear: whatever raises would be found there. Each target has every entrant, the forced one
    the acceptance it was told, and every part of a round is met."""
    out = tmp_path / "record.json"
    line = "--device cpu --smoke --batch 1 --rounds 2 --repeats 2 --shapes 3,1,4 4,3,8 --out".split()
    line = ["--force-accept-length", "3", *line]
    assert script("engine_gpu").main([*line, str(out)]) == 0
    record, table = read_record(out, "engine"), capsys.readouterr().out
    for name, accepted in (("tiny-demo", None), ("tiny-llama", 3)):
        rows = {row["engine"]: row for row in record["rows"] if row["target"] == name}
        assert set(rows) == {*OURS, "hf-generate-static"}
        for engine, row in rows.items():
            drafts = "chain" in engine or "tree" in engine
            assert set(row) >= DESIGNED and (row["rounds"], row["repeats"]) == (4, 2)
            if drafts:
                assert row["accept_length"] == (accepted or row["tokens"] / 4)
            else:
                assert (row["accept_length"], row["tokens"]) == (None, 4)
            assert row["forced"] == (accepted if drafts else None)
            assert row["speedup"] is not None and row["over"] in rows
            if engine in OURS:
                assert set(row["parts"]) == PARTS
                met = {part for part, seconds in row["parts"].items() if seconds > 0}
                assert met == PARTS if drafts else met >= {"verify", "sample", "host"} and "build" not in met
        assert f"eagle-own-tree, {name}" in record["left_out"]
    assert set(record["card"]["bytes_per_s"]) == {"copy", "read"}
    words = " ".join(table.split())
    assert words.count("tiny-llama; random EAGLE-3 head; forced accept_length 3.00") == 2
    assert "ours-chain-graph, tiny-llama, forced accept_length 3.00" in words
    assert len(record["targets"]) == 2 * 2 * (1 + 2), "two hows: a plain row and a chain of 3 with two targets"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_script_on_a_gpu(script, tmp_path) -> None:
    """Recorded part by part, where a wait for the device inside a round would have made it fall back on stamps."""
    out = tmp_path / "record.json"
    line = "--smoke --batch 2 --torch-compile-max-bs 2 --rounds 2 --repeats 2 --out".split()
    assert script("engine_gpu").main([*line, str(out)]) == 0
    rows = {(row["target"], row["engine"]): row for row in read_record(out, "engine")["rows"]}
    assert set(rows) == {(target, engine) for target in ("tiny-demo", "tiny-llama") for engine in OURS}
    for (_, engine), row in rows.items():
        assert row["parts_by"] == ("stamps" if engine.endswith("eager") else "graphs") and row["parts"]["verify"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it would be measured")
@pytest.mark.parametrize("line", [[], ["--smoke"], ["--device", "cpu"]])
def test_it_refuses_without_a_gpu(script, capsys, tmp_path, line) -> None:
    """Never a CPU's times under the name of a card."""
    out = tmp_path / "record.json"
    assert script("engine_gpu").main([*line, "--out", str(out)]) == 2
    assert "sees none here" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--smoke --device cpu --target x", "leave --draft, --target"),
        ("--batch 0", "1 at least"),
        ("--shapes 3,1,7", "--shapes: .*3"),
        ("--force-accept-length 0.5", "--force-accept-length: .*at least 1"),
        ("--force-accept-length 6", "--force-accept-length: .*chain 3"),
    ],
)
def test_what_does_not_go_together(script, capsys, line, says) -> None:
    """Said before the card is touched."""
    with pytest.raises(SystemExit):
        script("engine_gpu").main(line.split())
    assert re.search(says, capsys.readouterr().err)


class Ticking:
    """A clock that is one second further at every look."""

    on_device = False

    def __init__(self) -> None:
        self.at = 0

    def stamp(self) -> int:
        self.at += 1
        return self.at

    def wait(self) -> None:
        pass

    def seconds(self, first: int, last: int) -> float:
        return last - first


def test_time_belongs_to_the_innermost_part(script, tiny_target, tiny_draft) -> None:
    """Counted twice, or given to nobody, a part would be as cheap as one likes; what comes after counts for none."""
    module = script("round_parts")
    clock = Ticking()
    found = module.RoundParts(clock)
    outer = found._wrapped(lambda: inner(), "draft")
    inner = found._wrapped(lambda: scores(), "build")
    scores = found._wrapped(lambda: None, "verify")
    head_scores = found._wrapped(lambda: scores(), "draft")
    found.restart()  # 1
    outer()  # draft 2, build 3, verify 4, build 5, draft 6, host 7
    head_scores()  # draft 8, its scores by the target's matrix 9, 10, host 11
    found.stop()  # 12
    outer()
    assert found.seconds() == {"draft": 2 + 3, "build": 2, "verify": 1, "sample": 0, "compact": 0, "host": 1 + 1 + 1}
    own = HeadDrafter.draft
    with found.wrapped():
        assert HeadDrafter.draft is not own
    assert HeadDrafter.draft is own


class FakeGraph:
    """A graph that knows whether it is recorded, and is started by being written down."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def capture_begin(self, pool: object) -> None:
        self._log.append("begin")

    def capture_end(self) -> None:
        self._log.append("end")

    def replay(self) -> None:
        self._log.append("replay")


@pytest.fixture
def fake_cuda(monkeypatch) -> list[str]:
    """As much of torch.cuda as a recording touches, writing down what was asked of graphs."""
    log: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": lambda: FakeGraph(log), "Stream": lambda: stream, "current_stream": lambda: stream}
    fakes |= {"stream": lambda one: nullcontext(), "synchronize": lambda: None, "graph_pool_handle": lambda: (0, 1)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


def test_a_recording_is_cut_where_parts_change(script, fake_cuda) -> None:
    """One graph a part, in their order, each ended before the next begins, and a stamp before each start."""
    clock = Ticking()
    clock.on_device = True
    found = script("round_parts").RoundParts(clock)
    inner = found._wrapped(lambda: None, "build")
    draft = found._wrapped(lambda: (inner(), inner()), "draft")
    verify = found._wrapped(lambda: None, "verify")
    replay = found(lambda: (draft(), verify()))
    segments = ["host", "draft", "build", "draft", "build", "draft", "host", "verify", "host"]
    assert fake_cuda == ["begin", "end"] * len(segments)
    fake_cuda.clear()
    found.restart()
    replay()
    assert fake_cuda == ["replay"] * len(segments) and [part for part, _ in found._stamps[1:]] == [*segments, "host"]

    def waits():
        if found._cut is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    fails = found._wrapped(waits, "sample")
    with pytest.raises(EngineError, match="part by part .operation not permitted"):
        found(lambda: draft() and fails())
    assert found._cut is None and found.recorded == 1 and fake_cuda.count("begin") == fake_cuda.count("end")


def test_targets_from_files_and_eagles_own_engine(script, draft_directory, tiny_target_directory) -> None:
    """What head it is is said; an engine that is not installed is named with the reason, its files written before."""
    measure, targets, clocks = (script(name) for name in ("roofline_measure", "roofline_targets", "round_parts"))
    cpu, name = torch.device("cpu"), str(tiny_target_directory)
    args = script("engine_gpu").arguments().parse_args(["--eagle-python", sys.executable])
    bench = measure.Bench(args, cpu, clocks.Clock(cpu))
    trained, untrained = targets.demo_subject(None, draft_directory, cpu), targets.demo_subject(name, None, cpu)
    assert trained.head == f"trained (eagle3, {draft_directory})" and trained.target.name == name
    assert untrained.head == "initialised from the target, not trained" and untrained.forced is None
    with ExitStack() as stack:
        assert measure.open_eagle(bench, trained, stack) is None
        assert "No module named 'eagle'" in bench.left_out[f"eagle-own-tree, {name}"]
        assert measure.open_eagle(bench, untrained, stack) is None
        assert "needs --draft" in bench.left_out[f"eagle-own-tree, {name}"]


def test_bytes_of_a_plain_step(script, tiny_target) -> None:
    """Weights counted twice, or an embedding that is only looked up, would make the engine look faster than it is."""
    rows, targets = script("roofline_rows"), script("roofline_targets")
    subject = targets.Subject("tiny", tiny_target, None, "", None, [[1] * 10])
    config = tiny_target.config
    h, layer = 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert rows.weight_bytes(subject) == 4 * (config.num_hidden_layers * layer + h + config.vocab_size * h)
    assert rows.cache_bytes(subject) == 4 * 2 * config.num_hidden_layers * 2 * 16


def test_what_others_published_is_a_matter_of_accept_length(script) -> None:
    """Theirs is a trained head's: a forced accept_length gives the ratio beside theirs only where it is as long."""
    rows = script("roofline_rows")
    row = {"batch": 1, "target": "llama-3.1-8b-shaped, random weights", "engine": "ours-chain-graph", "shape": "chain"}
    row |= {"tokens_per_s": 300.0, "accept_length": 2.5, "speedup": 2.0, "speedup_per_accept_length": 0.8}
    others = [row | {"batch": 8}, row | {"target": "tiny-llama"}, row | {"engine": "hf-generate-static"}]
    (found,) = rows.beside_published([row, *others])
    assert found["needed"]["EAGLE-3"] == pytest.approx(373.25 / 158.34 / 0.8) and found["tokens_per_s"] == 300.0
    (plain,) = rows.beside_published([row | {"accept_length": None, "speedup_per_accept_length": None}])
    assert plain["needed"] == {"EAGLE-2": None, "EAGLE-3": None}
    assert rows.published_table([found, plain]).row_count == 2


def test_what_a_target_asks(script) -> None:
    """The three targets point in different directions."""
    rows = script("roofline_rows")
    row = {"batch": 1, "engine": "ours-tree-graph", "shape": "tree 7/8/32", "target": "t", "forced": 2.5}
    row |= {"overhead_of_verify": 0.31, "speedup_per_accept_length": 0.76, "share_of_bandwidth": None}
    found = {one["what"]: one["met"] for one in rows.verdicts([row, row | {"batch": 8}, row | {"engine": "x-eager"}])}
    assert found == {"round without verify, of verify": False, "speedup / accept_length": True}
    plain = row | {"shape": "plain", "share_of_bandwidth": 0.85, "forced": None}
    (one,) = rows.verdicts([plain])
    assert (one["wanted"], one["met"], one["target"]) == (0.85, True, "t")
