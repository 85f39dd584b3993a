"""The engine benchmark on a tiny target: every engine that is installed, the record, and what is left out. No times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from tests.targets.conftest import write_gguf
from toolkit.bench.near_tie import Divergence
from toolkit.bench.records import read_record
from toolkit.bench.side_by_side import BenchError

DESIGNED = {
    "engine", "version", "weight_bits", "batch", "context", "tokens", "seconds", "tokens_per_s", "accept_length",
    "peak_memory_bytes", "parts",
}  # fmt: skip
OURS = ["ours-plain", "ours-eagle3-chain", "ours-eagle3-tree", "ours-eagle3-adaptive"]
FP32 = ["generate-fp32", "generate-fp32-compiled", "prompt-lookup-fp32"]
NAMES = [*OURS, "ours-null", "ours-ngram", "hf-generate", "hf-prompt-lookup"]
FOREIGN = {
    "hf-generate-fp32",
    "hf-generate-torchao-int8",
    "vllm-cpu",
    "vllm-cpu-ngram",
    "vllm-cpu-eagle3",
    "eagle-own-tree",
    "llama.cpp",
}


class InProcess:
    """EngineProcess's interface without processes; `broken` engines fail at the call of that number."""

    broken: dict[str, int] = {}

    def __init__(self, worker, settings, threads: int, python: str | None = None, more=None) -> None:
        self.worker, self.asked, self.calls = worker, settings, 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_loaded(self) -> None:
        from engine_process import EngineProcessError

        try:
            self.engine = self.worker.ENGINES[self.asked["engine"]](self.asked)
        except ModuleNotFoundError as error:
            raise EngineProcessError(f"ModuleNotFoundError: {error}") from error
        self.version, self.weight_bits, self.most = self.engine.version, self.engine.weight_bits, self.engine.most
        self.settings = self.engine.settings

    def answer(self, prompt_ids, max_tokens: int) -> dict:
        self.calls += 1
        if self.broken.get(self.asked["draft"]) == self.calls:
            from engine_process import EngineProcessError

            raise EngineProcessError("its process ended with -9: without a word")
        began = time.perf_counter()
        told = json.loads(json.dumps(self.engine.answer(prompt_ids, max_tokens)))
        return {"seconds": time.perf_counter() - began, "peak_memory_bytes": 1000 * self.calls, **told}


@pytest.fixture
def bench(script, monkeypatch, draft_directory, tmp_path):
    """Runs the script on the tiny head; returns the record."""
    worker, cpu = script("engine_worker"), script("engine_cpu")
    monkeypatch.setattr(cpu, "EngineProcess", lambda *args: InProcess(worker, *args))
    monkeypatch.setattr(script("engine_plans"), "find_spec", lambda name: None)  # torchao, whatever this machine has
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
    options = {f"ours-plain-{what} and others -{what}" for what in ("compiled", "int8")}
    assert set(record["left_out"]) == {*FOREIGN, *options, "hf-prompt-lookup, batch 2"}
    table = capsys.readouterr().out
    for row in rows:
        assert set(row) >= DESIGNED and row["engine"] in table
        assert row["tokens_equal"] is True and row["near_ties"] == 0, "fp32: the tokens must be equal"
        assert (row["prompts"], row["tokens"]) == ((3, 54) if row["batch"] == 1 else (2, 36)), row["engine"]
        assert row["weight_bits"] == 32 and row["context"] > 9
        assert row["settings"].startswith("threads: ") and "float32" in row["settings"] and "eager" in row["settings"]
        if row["engine"] in ("ours-plain", "ours-null", "hf-generate", "hf-prompt-lookup"):
            assert row["accept_length"] is None, row["engine"]  # ours drafts nothing, Hugging Face does not count
        elif row["engine"] in ("ours-eagle3-chain", "ours-eagle3-tree"):
            assert row["accept_length"] >= 1 and row["parts"]["draft"] > 0
        else:  # lookup may find nothing, and the adaptive drafter may choose to draft nothing
            assert (row["accept_length"] or 1) <= 1 + 4, "a step commits its drafts and one token"


def test_rows_of_a_quantised_target(bench) -> None:
    """They are held against plain decoding of the same weights, and have its speed as their measure."""
    asked = ["ours-eagle3-chain-int8", "hf-generate-int8", "ours-eagle3-tree"]
    record = bench("--batch", "1", "--repeats", "1", "--quantization", "int8", "--only", *asked, limit=1)
    found = {row["engine"]: row for row in record["rows"]}
    assert set(found) == {*asked, "ours-plain", "ours-null", "ours-plain-int8"} and "all others" in record["left_out"]
    for name, row in found.items():
        small = "int8" in name
        assert row["tokens_equal"] is True and row["near_ties"] == 0, "fp32 arithmetic: the tokens must be equal"
        assert row["equals"] == ("ours-plain-int8" if small else "ours-plain")
        assert 8 < row["weight_bits"] < 16 if small else row["weight_bits"] == 32
        assert row["over"] == row["equals"] or name.startswith("hf")


def test_plans_of_every_option(script, tmp_path, tiny_draft, monkeypatch) -> None:
    """Compiled and quantised rows side by side, none of them missing, each beside plain decoding of its own kind."""
    cpu, worker = script("engine_cpu"), script("engine_worker")
    args = cpu.arguments().parse_args(["--quantization", "int8", "--torch-compile", "--dtype", "float32"])
    plans, _absent = cpu.plans_for(args, tiny_draft, {}, tmp_path)
    ours = {plan.name: plan for plan in plans if plan.name.startswith("ours-plain")}
    assert {name: (plan.equals, plan.over) for name, plan in ours.items()} == {
        "ours-plain": ("ours-plain", "ours-plain"),
        "ours-plain-compiled": ("ours-plain", "ours-plain-compiled"),
        "ours-plain-int8": ("ours-plain-int8", "ours-plain-int8"),
        "ours-plain-int8-compiled": ("ours-plain-int8", "ours-plain-int8-compiled"),
    }
    drafting = {plan.name: plan for plan in plans if plan.name.startswith("ours-eagle3-chain")}
    assert drafting["ours-eagle3-chain-int8-compiled"].equals == "ours-plain-int8-compiled"
    assert all(plan.equals == plan.over for plan in drafting.values())
    given: dict = {}
    llm = SimpleNamespace(
        target=SimpleNamespace(weight_bits=8.0, dtype="torch.bfloat16"),
        engine=SimpleNamespace(step=None),
        _loaded=SimpleNamespace(draft=None),
    )
    monkeypatch.setattr("toolkit.LLM", lambda **settings: given.update(settings) or llm)
    engine = worker.Ours({**shared_settings(tmp_path), **ours["ours-plain-int8-compiled"].settings})
    assert engine.settings == "threads: 1, bfloat16, int8 weights, torch.compile"
    assert (given["quantization"], given["torch_compile"]) == ("int8", True)


def test_engines_that_are_not_installed_are_named(bench, tmp_path) -> None:
    """Asked for and not importable: no row and no crash, but the reason; the files they would read were written."""
    python = ["--vllm-python", "python", "--eagle-python", "python", "--llama-python", "python"]
    asked = ["vllm-cpu", "vllm-cpu-ngram", "vllm-cpu-eagle3", "eagle-own-tree", "llama.cpp"]
    record = bench("--batch", "1", *python, "--gguf", str(tmp_path / "x.gguf"), "--only", *asked, limit=1)
    assert [row["engine"] for row in record["rows"]] == ["ours-plain", "ours-null"], "the control of the intervals"
    for name, module in (("vllm-cpu", "vllm"), ("eagle-own-tree", "eagle"), ("llama.cpp", "llama_cpp")):
        assert f"No module named '{module}'" in record["left_out"][name]
    assert "vllm" in record["left_out"]["vllm-cpu-eagle3"]


def test_rows_of_llama_cpps_server(script, tiny_draft, tiny_target, tiny_target_directory, tmp_path) -> None:
    """A row without a head and one with it for each type of weights; the head has 8 bits beside quantised ones."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target, quantised=True)
    (tmp_path / "out").mkdir()
    args = script("engine_cpu").arguments().parse_args(["--gguf", str(file), "--llama-server", "server"])
    shared = {"target": str(tiny_target_directory), "revision": None, "threads": 1}
    plans, absent = script("engine_plans").plans_for(args, tiny_draft, shared, tmp_path / "out")
    rows = {plan.name: plan for plan in plans if plan.name.startswith("llama.cpp")}
    drafts = ("", "-ngram", "-eagle3", "-eagle3-sure")
    assert list(rows) == [f"llama.cpp-{kind}{draft}" for kind in ("bf16", "q4_0", "q8_0") for draft in drafts]
    assert rows["llama.cpp-q8_0"].settings["gguf"] == str(file) and "llama.cpp" not in absent

    def stored(name: str, file: str) -> set[str]:
        tensors = gguf.GGUFReader(rows[name].settings[file]).tensors
        return {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2}

    assert stored("llama.cpp-bf16", "gguf") == {"BF16"} and stored("llama.cpp-q8_0-eagle3", "draft") == {"Q8_0"}
    assert stored("llama.cpp-q4_0", "gguf") == {"Q4_0", "Q8_0"}, "the embedding has 8 bits, as by llama-quantize"
    assert stored("llama.cpp-bf16-eagle3", "draft") == {"F32"}, "the tiny head is in float32"
    packed, plain = (gguf.GGUFReader(rows[name].settings["gguf"]) for name in ("llama.cpp-q8_0", "llama.cpp-bf16"))
    assert packed.fields.keys() - plain.fields.keys() == {"general.file_type"}
    values = [gguf.dequantize(one.tensors[3].data, one.tensors[3].tensor_type) for one in (packed, plain)]
    assert np.abs(values[0] - values[1]).max() <= np.abs(values[0]).max() / 256, "one rounding to bfloat16"


def test_folder_for_eagles_own_engine(script, tiny_target_directory, tmp_path) -> None:
    """Its transformers would take a rope of base 10000 where it finds no `rope_theta`, and a random embedding where it
    finds no index: both would only cost acceptance, in silence."""
    folders = script("engine_folders")
    out = Path(folders.eagle_target(str(tiny_target_directory), tmp_path / "target"))
    config, own = (json.loads((place / "config.json").read_text()) for place in (out, tiny_target_directory))
    assert config["rope_theta"] == own["rope_parameters"]["rope_theta"] and config["rope_scaling"] is None
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["model.embed_tokens.weight"] == "model.safetensors" and (out / "model.safetensors").is_file()
    assert "rope_theta" not in own, "the target's own files must stay as they are"
    with pytest.raises(BenchError, match="local directory; org/model came"):
        folders.eagle_target("org/model", tmp_path / "other")
    (tmp_path / "yarn").mkdir()
    (tmp_path / "yarn" / "config.json").write_text(json.dumps({"rope_parameters": {"rope_type": "yarn"}}))
    with pytest.raises(BenchError, match="'yarn'"):
        folders.eagle_target(str(tmp_path / "yarn"), tmp_path / "third")


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
    assert [row["engine"] for row in record["rows"]] == ["ours-plain", "ours-null", "hf-generate"]
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
    runs = [run("ours-plain", place, 4.0, [[7, place]]) for place in range(5)]
    for one in runs:
        one.reply["parts"] = parts
    runs += [run("tie", place, 2.0, [[7, 9 if place == 1 else place]]) for place in range(5)]
    runs += [run("wrong", place, 8.0, [[8, place]]) for place in range(5)]

    def judge(_reference: str, place: int, plain: list[int], other: list[int]) -> Divergence | None:
        if plain == other:
            return None
        return Divergence(0, plain[0], other[0], 0.0, 0.0, 0.0, 0.1, near_tie=other[0] == 7)

    entrants = [
        rows.Entrant(name, None, "ours-plain", "ours-plain", "1", 16.0) for name in ("ours-plain", "tie", "wrong")
    ]
    plain, tie, wrong = rows.rows_of(entrants, runs, [[1], [1, 2], [1], [1], [1]], 2, judge)
    assert (plain["speedup"], plain["tokens_equal"], plain["context"]) == (1.0, True, 4)
    assert plain["parts"]["host"] == 5 * 0.5 and plain["host_share"] == pytest.approx(1 / 3)
    assert (tie["speedup"], tie["interval"], tie["tokens_per_s"]) == (2.0, [2.0, 2.0], 1.0)
    assert (tie["tokens_equal"], tie["near_ties"], tie["unequal"]) == (True, 1, 0)
    assert (wrong["speedup"], wrong["tokens_equal"], wrong["unequal"]) == (0.5, False, 5)
    assert tie["decode_speedup"] is None and plain["decode_speedup"] == 1.0


def test_intervals_are_as_wide_as_the_null_control_asks(script) -> None:
    """A drafter that drafts nothing is as fast as plain decoding. Where it measures faster, so may the others."""
    rows = script("engine_rows")

    def found(null: list, other: list) -> list:
        given = (("ours-plain", [1.0, 1.0]), ("ours-null", null), ("other", other))
        made = [{"engine": name, "batch": 1, "interval": interval} for name, interval in given]
        return [(row["interval"], row["widened_by"]) for row in rows._widened(made, 1)]

    assert found([0.99, 1.02], [1.2, 1.4]) == [([1, 1], 1.0), ([0.99, 1.02], 1.0), ([1.2, 1.4], 1.0)]
    assert found([1.25, 1.5], [2, 4]) == [([1, 1], 1.25), ([1, 1.875], 1.25), ([1.6, 5], 1.25)]
    assert found([0.25, 0.5], [2, 4]) == [([1, 1], 2), ([0.125, 1], 2), ([1, 8], 2)]
    assert found([None, None], [None, None])[2] == ([None, None], None)


def test_the_null_control_drafts_nothing(script, draft_directory, tiny_target_directory) -> None:
    """With a head that is never asked; one that drafts would not come out at 1.00."""
    engine = script("engine_worker").Ours(
        {**shared_settings(tiny_target_directory), "draft": str(draft_directory), "shape": "3,1,4", "null": True}
    )
    told = engine.answer([[5, 6, 7]], 6)
    assert told["accepted"] == 0 and len(told["output_ids"][0]) == 6
    assert engine.settings.endswith("eager, no request drafts")


def test_hugging_face_at_its_best(script, tmp_path, monkeypatch) -> None:
    """Each with a compiled row; in float32 where this CPU is faster so; torchao's weights are its own."""
    cpu, plans = script("engine_cpu"), script("engine_plans")
    monkeypatch.setattr(plans, "find_spec", lambda name: name)
    args = cpu.arguments().parse_args(["--torch-compile", "--dtype", "bfloat16"])

    def rows(fastest: torch.dtype) -> dict:
        monkeypatch.setattr(plans, "fastest_cpu_dtype", lambda: fastest)
        made, absent = plans.plans_for(args, None, {}, tmp_path)
        assert ("hf-generate-fp32" in absent) == (fastest == torch.bfloat16)
        return {plan.name: plan for plan in made if plan.name.startswith("hf")}

    usual = ["hf-generate", "hf-generate-compiled", "hf-prompt-lookup"]
    weights = ["hf-generate-torchao-int8", "hf-generate-torchao-int8-compiled"]
    found = rows(torch.float32)
    assert list(found) == [*usual, *(f"hf-{name}" for name in FP32), *weights]
    assert {name: plan.settings["dtype"] for name, plan in found.items() if "dtype" in plan.settings} == {
        **{f"hf-{name}": "float32" for name in FP32},
        **dict.fromkeys(weights, "float32"),
    }
    assert [name for name, plan in found.items() if plan.equals is None] == weights
    assert list(rows(torch.bfloat16)) == [*usual, *weights]


def test_vllm_with_lookup_and_what_its_page_tells_to_preload(script, tmp_path, monkeypatch) -> None:
    """Without its allocator and OpenMP, or without drafts that need no head, it would look slower than it is."""
    monkeypatch.setattr("ctypes.util.find_library", "lib{}.so.4".format)
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    line = ["--dtype", "float32", "--vllm-python", str(tmp_path / "bin" / "python"), "--lookup", "5"]
    args = script("engine_cpu").arguments().parse_args(line)
    made, _absent = script("engine_plans").plans_for(args, None, {"threads": 1}, tmp_path)
    plain, lookup = (plan for plan in made if plan.name.startswith("vllm"))
    assert plain.environment == lookup.environment
    assert plain.environment["LD_PRELOAD"] == "libtcmalloc_minimal.so.4:mine.so"
    assert plain.environment["VLLM_CPU_OMP_THREADS_BIND"].isdecimal(), "one core, as many as our threads"
    assert (lookup.name, lookup.shape, lookup.settings["draft"]) == ("vllm-cpu-ngram", "5,1,6", "ngram")


def test_torchaos_weights(script, monkeypatch) -> None:
    """Its bits are those of the parts that a quantised tensor consists of; the tensor itself says those of bfloat16."""

    class Parts(torch.Tensor):
        def __tensor_flatten__(self):
            return ["numbers", "scales"], None

    def quantize(model, config):
        one = torch.Tensor._make_subclass(Parts, model.weight.data)
        one.numbers, one.scales = torch.zeros(4, 8, dtype=torch.int8), torch.zeros(4, dtype=torch.bfloat16)
        model.parameters = lambda: [one, model.bias]

    quantization = SimpleNamespace(Int8WeightOnlyConfig=object, quantize_=quantize)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__version__="0.9", quantization=quantization))
    monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)
    model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    said, bits = script("engine_worker").quantised_by_torchao(model)
    assert said == "int8 weights of torchao 0.9" and bits == pytest.approx(8 * (32 + 8 + 8) / 36)


def shared_settings(target: Path) -> dict:
    own = {"target": str(target), "revision": None, "dtype": "auto", "quantization": None, "torch_compile": False}
    return {**own, "draft": None, "shape": None, "max_running_requests": 2, "threads": 1}


@pytest.mark.process
def test_an_engine_in_a_process_of_its_own(script, tiny_target_directory, tiny_target, capfd) -> None:
    """The protocol itself: what an engine prints must not get between its replies, and its memory is its own."""
    from toolkit.infer.engine.engine import Engine
    from toolkit.infer.request.params import SamplingParams

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


@pytest.mark.process
def test_an_engine_that_is_not_installed_says_so(script) -> None:
    """The reason stands under the table."""
    process = script("engine_process")
    with process.EngineProcess({"engine": "llama.cpp", "gguf": "x.gguf"}, threads=1) as absent:
        with pytest.raises(process.EngineProcessError, match="No module named 'llama_cpp'"):
            absent.wait_until_loaded()
