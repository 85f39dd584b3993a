"""The engine benchmark on a tiny target: every engine that is installed, the record, and what is left out. No times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.bench.near_tie import Divergence
from toolkit.bench.records import read_record
from toolkit.bench.side_by_side import BenchError

DESIGNED = {
    "engine", "version", "weight_bits", "batch", "context", "tokens", "seconds", "tokens_per_s", "accept_length",
    "peak_memory_bytes", "parts",
}  # fmt: skip
NAMES = ["ours-plain", "ours-eagle3-chain", "ours-eagle3-tree", "ours-ngram", "hf-generate", "hf-prompt-lookup"]


class InProcess:
    """EngineProcess's interface without processes; `broken` engines fail at the call of that number."""

    broken: dict[str, int] = {}

    def __init__(self, worker, settings, threads: int, python: str | None = None) -> None:
        self.worker, self.settings, self.calls = worker, settings, 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_loaded(self) -> None:
        self.engine = self.worker.ENGINES[self.settings["engine"]](self.settings)
        self.version, self.weight_bits = self.engine.version, self.engine.weight_bits

    def answer(self, prompt_ids, max_tokens: int) -> dict:
        self.calls += 1
        if self.broken.get(self.settings["draft"]) == self.calls:
            from engine_process import EngineProcessError

            raise EngineProcessError("its process ended with -9: without a word")
        told = json.loads(json.dumps(self.engine.answer(prompt_ids, max_tokens)))
        return {"seconds": 1.0, "peak_memory_bytes": 1000 * self.calls, **told}


@pytest.fixture
def bench(script, monkeypatch, draft_directory, tmp_path):
    """Runs the script on the tiny head; returns the record."""
    worker, cpu = script("engine_worker"), script("engine_cpu")
    monkeypatch.setattr(cpu, "EngineProcess", lambda *args: InProcess(worker, *args))
    monkeypatch.setattr(cpu.torch, "set_num_threads", lambda count: None)

    def run(*more: str, limit: int = 3) -> dict:
        out = tmp_path / "engine.json"
        line = ["--draft", str(draft_directory), "--limit", str(limit), "--max-tokens", "9", "--out", str(out), *more]
        assert cpu.main(line) == 0
        return read_record(out, "engine")

    return run


def test_every_engine_writes_the_same_tokens(bench, capsys) -> None:
    """An engine that stops early, or decodes another prompt, would win the race by not running it."""
    record = bench("--batch", "2", "1", "--repeats", "2", "--tree", "3,3,8")
    rows = record["rows"]
    assert [row["engine"] for row in rows if row["batch"] == 1] == NAMES
    assert [row["engine"] for row in rows if row["batch"] == 2] == NAMES[:-1]  # Hugging Face looks up for one at a time
    assert set(record["left_out"]) == {"vllm-cpu", "llama.cpp", "hf-prompt-lookup, batch 2"}
    table = capsys.readouterr().out
    for row in rows:
        assert set(row) >= DESIGNED and row["engine"] in table
        assert row["tokens_equal"] is True and row["near_ties"] == 0, "fp32: the tokens must be equal"
        assert (row["prompts"], row["tokens"]) == ((3, 54) if row["batch"] == 1 else (2, 36)), row["engine"]
        assert row["weight_bits"] == 32 and row["context"] > 9
        drafts = row["engine"] in NAMES[1:3]
        assert (row["accept_length"] or 0) >= 1 if drafts else row["engine"] == "ours-ngram" or not row["accept_length"]


def test_parts_add_up_to_the_whole(bench) -> None:
    """Time that no part owns would hide the host's share, which is the number to bring down."""
    for row in bench("--batch", "1", "--repeats", "1", "--only", "ours-eagle3-chain", "hf-generate")["rows"]:
        if row["engine"].startswith("ours"):
            assert set(row["parts"]) == {"prefill", "draft", "verify", "commit", "host"}
            assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
            assert 0 < row["host_share"] < 1
        else:
            assert row["parts"] == {} and row["host_share"] is None


def test_an_engine_that_dies_costs_its_own_row_only(bench, monkeypatch) -> None:
    """vLLM running out of memory in the last group must not cost a quarter of an hour of measuring."""
    monkeypatch.setattr(InProcess, "broken", {"ngram": 3})
    record = bench("--batch", "1", "--repeats", "1", "--only", "ours-ngram", "hf-generate")
    assert [row["engine"] for row in record["rows"]] == ["ours-plain", "hf-generate"]
    assert "-9" in record["left_out"]["ours-ngram"]


def test_without_the_reference_there_is_no_record(bench, monkeypatch) -> None:
    """Rows without plain decoding beside them would compare with nothing."""
    monkeypatch.setattr(InProcess, "broken", {None: 2})
    with pytest.raises(BenchError, match="ours-plain.*-9"):
        bench("--batch", "1", "--only", "ours-plain")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--batch", "1", "4"], "--batch 4 needs so many prompts, 3 came"),
        (["--batch", "1", "--only", "sglang"], "--only sglang: .* ours-plain, ours-eagle3-chain"),
        (["--batch", "1", "--max-tokens", "1"], "--max-tokens 1"),
    ],
)
def test_what_cannot_be_measured(bench, more, says) -> None:
    """Said before an engine is loaded."""
    with pytest.raises(BenchError, match=says):
        bench(*more)


def test_rows_are_paired_with_plain_decoding(script) -> None:
    """Speedup must compare the same groups, and a wrong token must be told from a near-tie."""
    rows = script("engine_rows")

    def run(engine: str, first: int, seconds: float, written: list[list[int]], repeat: int = 0):
        return rows.Run(
            engine, 1, repeat, first, {"seconds": seconds, "peak_memory_bytes": None, "output_ids": written}
        )

    parts = {"prefill": 1.0, "draft": 0.0, "verify": 2.0, "commit": 0.5}
    runs = [run("ours-plain", place, 4.0, [[7, place]]) for place in range(3)]
    for one in runs:
        one.reply["parts"] = parts
    runs += [run("tie", place, 2.0, [[7, 9 if place == 1 else place]]) for place in range(3)]
    runs += [run("wrong", place, 8.0, [[8, place]]) for place in range(3)]

    def judge(place: int, plain: list[int], other: list[int]) -> Divergence | None:
        if plain == other:
            return None
        return Divergence(0, plain[0], other[0], 0.0, 0.0, 0.0, 0.1, near_tie=other[0] == 7)

    entrants = [rows.Entrant(name, None, True, "1", 16.0) for name in ("ours-plain", "tie", "wrong")]
    plain, tie, wrong = rows.rows_of(entrants, runs, [[1], [1, 2], [1]], 2, judge)
    assert (plain["speedup"], plain["tokens_equal"], plain["context"]) == (1.0, True, 4)
    assert plain["parts"]["host"] == 3 * 0.5 and plain["host_share"] == pytest.approx(1 / 3)
    assert (tie["speedup"], tie["interval"], tie["tokens_per_s"]) == (2.0, [2.0, 2.0], 1.0)
    assert (tie["tokens_equal"], tie["near_ties"], tie["unequal"]) == (True, 1, 0)
    assert (wrong["speedup"], wrong["tokens_equal"], wrong["unequal"]) == (0.5, False, 3)
    assert tie["decode_speedup"] is None and plain["decode_speedup"] == 1.0


def shared_settings(target: Path) -> dict:
    own = {"target": str(target), "revision": None, "dtype": "auto", "quantization": None}
    return {**own, "draft": None, "shape": None, "max_batch": 2}


def test_an_engine_in_a_process_of_its_own(script, tiny_target_directory, tiny_target, capfd) -> None:
    """The protocol itself: what an engine prints must not get between its replies, and its memory is its own."""
    from toolkit.infer.engine import Engine
    from toolkit.infer.sampling.sampling_params import SamplingParams

    process = script("engine_process")
    engine = Engine(tiny_target)
    (request,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.close()
    settings = {"engine": "ours", **shared_settings(tiny_target_directory)}
    with process.EngineProcess(settings, threads=1) as ours:
        ours.wait_until_loaded()
        assert ours.weight_bits == 32
        reply = ours.answer([[5, 6, 7]], 5)
        assert reply["output_ids"] == [request.output_ids] and reply["seconds"] > 0
        assert reply["peak_memory_bytes"] is None or reply["peak_memory_bytes"] > 10**7
        with pytest.raises(process.EngineProcessError, match="ended with 1: .*no tokens|is empty"):
            ours.answer([[]], 5)


@pytest.mark.parametrize("engine", ["ours", "hugging-face"])
def test_a_quantised_target_has_fewer_bits(script, tiny_target_directory, engine) -> None:
    """Both rows of the table are then about the same quantised target."""
    settings = {**shared_settings(tiny_target_directory), "engine": engine, "quantization": "int8", "lookup": None}
    with script("engine_process").EngineProcess(settings, threads=1) as quantised:
        quantised.wait_until_loaded()
        assert 8 < quantised.weight_bits < 16


def test_an_engine_that_is_not_installed_says_so(script) -> None:
    """The reason stands under the table."""
    process = script("engine_process")
    with process.EngineProcess({"engine": "llama.cpp", "gguf": "x.gguf"}, threads=1) as absent:
        with pytest.raises(process.EngineProcessError, match="No module named 'llama_cpp'"):
            absent.wait_until_loaded()
