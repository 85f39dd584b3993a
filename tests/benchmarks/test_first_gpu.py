"""first_gpu.sh and the scripts that only it runs, as far as a machine without a GPU can hold them. No times."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from toolkit.bench.records import read_record
from toolkit.cli import command_parser
from toolkit.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "first_gpu.sh"
STEPS = [str(number) for number in range(10)]
# Notes how it was called, and does nothing. `import torch` succeeds as on a machine with a GPU.
NOTES = '#!/usr/bin/env bash\nprintf "%q " "$@" >> "$NOTED"; echo >> "$NOTED"\n'


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What first_gpu.sh runs with these arguments on a machine with a GPU, each as a list of words; its status."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "clone" / "benchmarks")
    python = tmp_path / "python"
    python.write_text(NOTES)
    python.chmod(0o755)
    for number in (1, 2):
        (tmp_path / "clone" / ".gpu" / f"demo-{number}").mkdir(parents=True)
        (tmp_path / "clone" / ".gpu" / f"demo-{number}" / f"part-0{number - 1}").touch()
    for name, text in {"test_here": "ON_GPU = pytest.mark.gpu", "test_elsewhere": ""}.items():
        (tmp_path / "clone" / "tests").mkdir(exist_ok=True)
        (tmp_path / "clone" / "tests" / f"{name}.py").write_text(text)
    (tmp_path / "kept" / "site").mkdir(parents=True)
    of_its_own = {"PY": python, "OUT": tmp_path / "out", "KEEP": tmp_path / "kept", "NOTED": tmp_path / "noted"}
    environment = {**os.environ, **{name: str(path) for name, path in of_its_own.items()}}

    def run(*arguments: str, **more: str) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
        line = ["bash", str(tmp_path / "clone" / "benchmarks" / "first_gpu.sh"), *arguments]
        done = subprocess.run(line, env={**environment, **more}, capture_output=True, text=True)
        return [shlex.split(noted) for noted in (tmp_path / "noted").read_text().splitlines()], done

    return run


def test_every_call_is_one_that_its_script_takes(calls, script) -> None:
    """A misspelt option or a moved file would be found on the machine only, where minutes are dear."""
    lines, done = calls(*STEPS)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    ours = [line for line in lines if line[0].startswith("benchmarks/")]
    measuring = ("rounds_gpu", "cliffs_gpu", "training_gpu", "engine_gpu", "kernels_gpu", "gpu_probe", "deterministic")
    parsers = {name: script(name).arguments for name in measuring}
    for path, *options in ours:
        if (name := Path(path).stem) in parsers:
            parsers[name]().parse_args(options)
    names = [Path(line[0]).stem for line in ours]
    assert set(names) == {*parsers, "products_gpu", "carried_wheels"} and names.count("rounds_gpu") == 3
    benches = [command_parser(line[2])[1](line[3:]) for line in lines if line[:2] == ["-m", "toolkit"]]
    assert [getattr(args, "dtype", None) for args in benches] == ["float32", None, None], "the second compares"
    short = re.search(r"^SHORT_RUN=\((.*)\)", SCRIPT.read_text(encoding="utf-8"), re.M)
    assert short and load_recipe(ROOT / "recipes" / "smollm2-135m.yaml", short[1].split()).prompts.synthesize == 160
    records = [line[line.index("--out") + 1] for line in lines if "--out" in line]
    assert len(set(records)) == len(records) == 12, "no record replaces another"


def test_files_and_tests_that_it_names_exist(calls) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:benchmarks|tests|recipes)/[\w/.-]*\w", text)) - {"benchmarks/results"}
    assert len(named) > 6 and not [path for path in named if not (ROOT / path).exists()]
    lines, _ = calls("2", "4")
    (tested,) = (line for line in lines if "-q" in line)
    assert tested[-1] == "tests/test_here.py" and "tests/test_elsewhere.py" not in tested
    (chosen,) = (line[line.index("-k") + 1] for line in lines if "-k" in line)
    trainer = (ROOT / "tests" / "train" / "test_loop.py").read_text(encoding="utf-8")
    for part in chosen.split(" or "):
        assert re.search(rf"^def test_\w*{part}", trainer, re.M), f"no test of the trainer is called {part}"


def test_a_failure_is_told_at_the_end_and_triton_s_is_remembered(calls, tmp_path) -> None:
    """The next step runs all the same, without Triton where Triton does not work."""
    python = tmp_path / "python"
    broken = 'case "$1" in *gpu_probe.py) echo "FAILED a Triton kernel ImportError";; *rounds_gpu.py) exit 7;; esac\n'
    python.write_text(NOTES + broken)
    lines, done = calls("0", "3", "5")
    assert done.returncode == 1 and done.stderr.count("FAILED: ") == 3
    assert lines[-1][0].endswith("kernels_gpu.py"), "the calls after a failed one run"
    assert "go without it" in done.stdout and "without Triton" not in done.stdout
    assert "without Triton" in calls("0")[1].stdout
    assert "sys.modules['triton'] = None" in (tmp_path / "kept" / "site" / "sitecustomize.py").read_text()


def test_it_ends_without_a_gpu(calls, tmp_path) -> None:
    """Never times of a CPU in the place of a card's; FORCE=1 rehearses all of it on tiny models."""
    (tmp_path / "python").write_text(NOTES + 'case "$*" in *cuda.is_available*) exit 1;; esac\n')
    lines, done = calls(*STEPS)
    assert done.returncode == 3 and "FORCE=1" in done.stderr and lines[-1] == ["benchmarks/gpu_probe.py"]
    lines, done = calls("3", "4", "6", FORCE="1")
    ours = [line for line in lines if "--out" in line]
    assert done.returncode == 0 and len(ours) == 4 and all("tiny" in line or "--smoke" in line for line in ours)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it would be measured")
@pytest.mark.parametrize("name", ["rounds_gpu", "cliffs_gpu", "training_gpu", "gpu_probe"])
def test_the_scripts_refuse_without_a_gpu(script, monkeypatch, capsys, tmp_path, name) -> None:
    out, module = tmp_path / "record.json", script(name)
    monkeypatch.setattr(module, "IMPORTED", (), raising=False)
    assert module.main(["--out", str(out)]) in (2, 3)
    assert "sees no CUDA device here" in capsys.readouterr().err and not out.exists()


def test_rounds_are_measured_in_every_way(script, tmp_path, capsys) -> None:
    """A way that cannot run, or a record without what it is made for, would cost a call on the card."""
    out = tmp_path / "record.json"
    line = "--device cpu --target tiny --context 20 --rounds 2 --turns 1 --batch 2 --shapes 3,1,4 --kernels"
    assert script("rounds_gpu").main([*line.split(), "--force-accept-length", "3", "--out", str(out)]) == 0
    record, table = read_record(out, "rounds"), capsys.readouterr().out
    assert not record["left_out"] and set(record["rows"][0]) >= record["definitions"].keys() - {"how"}
    found = {(row["batch"], row["how"], row["shape"]) for row in record["rows"]}
    assert len(found) == 2 * 3 and {how for _, how, _ in found} == {"eager", "graph", "graph-serial"}
    for row in record["rows"]:
        assert row["accept_length"] == (None if row["shape"] == "plain" else 3)
        assert row["kernels"]["count"] > 50 and row["kernels"]["by_name"] and row["compiled"]["count"] == 0
    assert "kernels a round" in table and {"triton", "cuda"} <= record["versions"].keys()


def test_a_row_that_fails_costs_itself(script, tmp_path, monkeypatch) -> None:
    """The others of its engine are measured, and the record says why it has no row."""
    module, out = script("cliffs_gpu"), tmp_path / "record.json"
    monkeypatch.setattr(module, "GROUPS", (module.GROUPS[0], module.GROUPS[-1]))
    own = module.Cliffs.rounds

    def rounds(cliffs, engine, counts, every, **first):
        assert "logprobs" not in first, "a cliff"
        return own(cliffs, engine, counts, every, **first)

    monkeypatch.setattr(module.Cliffs, "rounds", rounds)
    line = "--device cpu --target tiny --context 20 --rounds 2 --turns 1"
    assert module.main([*line.split(), "--out", str(out)]) == 0
    record = read_record(out, "cliffs")
    cases = [row["case"] for row in record["rows"] if row["shape"] == "plain"]
    assert cases == ["greedy", "one with a penalty", module.DRAWN, "1/4", "2", "16 mixed", "16"]
    assert len(record["left_out"]) == 2 and all("a cliff" in why for why in record["left_out"].values())


def test_compilations_are_counted(script) -> None:
    """Those that the cache of an earlier process answered take no time of a request."""
    knobs = pytest.importorskip("triton.knobs")
    found = script("rounds_gpu").Compilations()
    times = type("Times", (), {"total": 250_000})()
    with found.listened_to():
        for hit in (True, False, False):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert (found.count, found.seconds) == (2, 0.5) and knobs.compilation.listener is None


SHORT = "--device cpu --target tiny --length 64 --steps 2 --repeats 1 --out".split()


def test_the_parts_of_a_training_step_are_measured(script, tmp_path, capsys) -> None:
    """All rows start from the same weights, so that their first losses can be compared on the card."""
    out = tmp_path / "record.json"
    assert script("training_gpu").main([*SHORT, str(out), "--only", "as is", "packed", "layers apart"]) == 0
    record, table = read_record(out, "training"), capsys.readouterr().out
    rows = {row["row"]: row for row in record["rows"]}
    assert not record["left_out"] and rows.keys() == {"as is", "packed", "layers apart"}
    assert {row["tokens"] for row in rows.values()} == {128} and rows["packed"]["positions"] == 128
    assert "tokens/s" in table.splitlines()[-7]
    for row in rows.values():
        assert all(row["parts"].values()) and sum(row["parts"].values()) <= row["seconds_per_step"]
        assert all(work > 0 for part, work in row["tflop"].items() if part != "optimizer")
    assert rows["as is"]["first_loss"] == pytest.approx(rows["layers apart"]["first_loss"], rel=1e-5)


def test_a_row_that_fails_or_hangs_costs_only_itself(script, monkeypatch, tmp_path, capsys) -> None:
    module, out = script("training_gpu"), tmp_path / "record.json"
    own = module.measured

    def measured(row, *given):
        if row.name == "as is":
            raise torch.OutOfMemoryError("no memory")
        if row.name == "unaligned":
            time.sleep(60)
        return own(row, *given)

    monkeypatch.setattr(module, "ROW_SECONDS", 2)
    monkeypatch.setattr(module, "measured", measured)
    assert module.main([*SHORT, str(out), "--only", "as is", "unaligned", "packed"]) == 0
    record = read_record(out, "training")
    assert [row["row"] for row in record["rows"]] == ["packed"] and record["rows"][0]["tflop"]
    assert record["left_out"] == {"as is": "OutOfMemoryError: no memory", "unaligned": "TimeoutError: more than 2 s"}
    assert module.main([*SHORT, str(out), "--budget", "0"]) == 1
    assert len(read_record(out)["left_out"]) == len(module.ROWS)


def test_the_probe_goes_on_behind_a_failure(script, monkeypatch, tmp_path, capsys) -> None:
    """One operation that cannot be recorded must not hide the others."""
    module, out = script("gpu_probe"), tmp_path / "record.json"
    monkeypatch.setattr(module, "IMPORTED", ("json", "no_such_module"))
    monkeypatch.setattr(module, "TINY", 3)
    assert module.main(["--device", "cpu", "--out", str(out)]) == 0
    rows = {row["probe"]: row for row in read_record(out, "gpu-probe")["rows"]}
    assert [name for name, row in rows.items() if row["failed"]] == ["import no_such_module"]
    timed = [name for name, row in rows.items() if row["microseconds"] is not None]
    assert len(timed) == len(rows) - 2 and "graph: topk" in timed and "eager: one launch" in timed
    assert "FAILED import no_such_module ModuleNotFoundError" in capsys.readouterr().out


def test_carried_wheels_leave_what_is_installed_alone(script, tmp_path, monkeypatch) -> None:
    """An older NumPy in front of the machine's own would break what was built for that one."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir(), site.mkdir()
    for name in ("Not_There-1.0", "numpy-0.1"):
        with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name.split('-')[0]}.py", "")
            archive.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name.split('-')[0]}\n")
    unpack = script("carried_wheels").unpack
    assert unpack(wheels, site) == ["not-there"] and (site / "Not_There.py").is_file()
    assert unpack(wheels, site) == [], "the second call of the hour"
    monkeypatch.syspath_prepend(str(site))
    assert unpack(wheels, site, {"numpy"}) == ["numpy"] and unpack(wheels, site, {"numpy"}) == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run on the GPU here")
def test_rehearsal(tmp_path) -> None:
    """The shell script with the scripts themselves, on tiny models."""
    of_its_own = {"PY": sys.executable, "OUT": str(tmp_path / "out"), "KEEP": str(tmp_path / "kept"), "FORCE": "1"}
    line = ["bash", str(SCRIPT), "0", "3"]
    done = subprocess.run(line, env={**os.environ, **of_its_own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("gpu-probe", "rounds-llama", "rounds-llama-eager"):
        assert read_record(tmp_path / "out" / f"{name}.json")["hardware"]
        assert f"results_folder.py {tmp_path}/out/{name}.json {name}" in done.stdout
