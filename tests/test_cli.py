"""The command line: quick help, errors in one line, exit statuses, and a README that does not drift."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from toolkit import __version__, cli
from toolkit.commands import run as run_command
from toolkit.errors import exit_status
from toolkit.pipeline.run import Run
from toolkit.recipe import DEMO_RECIPE, load_recipe

REPOSITORY = Path(__file__).resolve().parent.parent


def python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, **options)  # type: ignore[call-overload]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """`toolkit --help` and shell completion must not wait seconds for torch. The limit is CPU time, not the clock's."""
    code = (
        "import sys, time; begin = time.process_time(); from toolkit.cli import main; status = main(['--help']); "
        "used = time.process_time() - begin; heavy = {'torch', 'numpy', 'yaml', 'rich'} & set(sys.modules); "
        "print('HEAVY', heavy, used < 0.3); sys.exit(status)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "HEAVY set() True" in done.stdout
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout and cli.command_help(name) in done.stdout


def test_the_package_loads_torch_only_when_the_engine_is_asked_for() -> None:
    """`import toolkit` is part of every command; `from toolkit import LLM` is what needs the engine."""
    code = (
        "import sys, toolkit; light = 'torch' not in sys.modules; from toolkit import LLM, SamplingParams; "
        "light &= 'transformers' not in sys.modules; "
        "print(light, 'torch' in sys.modules, LLM.__name__, set(toolkit.__all__) <= set(dir(toolkit)))"
    )
    assert python(code).stdout == "True True LLM True\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_commands_help_loads_no_torch(name: str) -> None:
    """A parser that imports the engine makes every typing error cost seconds."""
    code = (
        "import sys\nfrom toolkit.cli import main\ntry:\n    main([sys.argv[1], '--help'])\n"
        "finally:\n    print('TORCH' if 'torch' in sys.modules else 'LIGHT')"
    )
    done = python(code, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: toolkit {name}") and done.stdout.endswith("LIGHT\n")


def test_module_and_version() -> None:
    """`python -m toolkit` serves environments whose scripts are not on the PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "--version"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout == f"toolkit {__version__}\n"
    assert f'version = "{__version__}"' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def test_user_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A traceback suggests a bug in the program; these one-line errors say what to do."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\ntarget: {model: tiny}\ntrain: {max_step: 3}\n")
    for arguments, message in (
        (["run", str(recipe)], "did you mean train.max_steps?"),
        (["run", str(tmp_path / "absent.yaml")], "no recipe at"),
        (["run", str(recipe), "train={}"], "the recipe names no prompts"),
        (
            ["run", str(recipe), "train={}", "prompts.sources=[absent.jsonl]"],
            "absent.jsonl, which does not exist; correct",
        ),
        (["rnu"], "did you mean run?"),
        (["report", str(tmp_path / "absent")], "absent"),
        (["rollouts", "--out", "x.jsonl"], "must be given together"),
        (["build-token-map", "--size", "8"], "token_map.size=N"),
        (["bench", "acceptance", "--draft", str(tmp_path)], "is no draft directory"),
    ):
        assert cli.main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("toolkit: error: ") and error.count("\n") == 1 and message in error, error


def test_overrides_may_follow_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By default argparse rejects `run RECIPE --print-config a.b=c`."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\ntarget: {model: tiny}\n")
    assert cli.main(["run", str(recipe), "seed=1", "--print-config", "train.max_steps=9"]) == 0
    printed = capsys.readouterr().out
    assert "max_steps: 9" in printed and "seed: 1" in printed


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debugging needs the traceback."""
    monkeypatch.setenv("TOOLKIT_LOG", "debug")
    with pytest.raises(FileNotFoundError):
        cli.main(["run", "absent.yaml"])


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain ValueError is no user error: without the traceback, a bug would be hidden."""
    monkeypatch.setattr(run_command, "run", lambda args: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["run", "r.yaml"])


def test_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts distinguish Ctrl-C from failure by the status 130."""

    def interrupted(args: SimpleNamespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "run", interrupted)
    assert cli.main(["run", "r.yaml"]) == 130
    assert "files written so far are kept" in capsys.readouterr().err


def test_readme_has_its_two_commands() -> None:
    """New users type these commands, and .ci/run runs the second one."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "toolkit run recipes/smollm2-135m.yaml" in readme and 'pip install -e ".[dev]" && pytest' in readme


def test_the_longer_training_keeps_what_the_user_set(tmp_path: Path) -> None:
    """The printed line would train the recipe's target in place of the one that was measured."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "measured.json").write_text('{"recommended": null}')
    given = ("target.model=org/x", "target.chat_template=none", "train.epochs=2", f"run_dir={tmp_path}")
    said = run_command.next_steps(Run(load_recipe(DEMO_RECIPE, given), DEMO_RECIPE, given))
    more = f"target.model=org/x target.chat_template=none train.epochs=4.0 run_dir={tmp_path}-longer "
    assert f"toolkit run {DEMO_RECIPE} {more}" in said
    assert "toolkit serve --target org/x --chat-template=none" in said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),  # torch.save
    ],
)
def test_a_full_disk_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """As the writers of Python, safetensors and torch report it."""

    def work() -> int:
        raise error

    assert exit_status(work) == 2
    said = capsys.readouterr().err
    assert "the disk is full (" in said and said.count("\n") == 1


@pytest.mark.parametrize(("lookup", "how"), [(1.85, "--draft ngram --target m"), (0.97, "--target m")])
def test_a_head_that_gains_nothing_is_not_what_comes_next(tmp_path: Path, lookup: float, how: str) -> None:
    """Where lookup pays, it does so without the head."""
    rows = [
        {"shape": "adaptive", "lookup": False, "speedup": 0.98},
        {"shape": "adaptive", "lookup": True, "speedup": lookup},
    ]
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "measured.json").write_text(json.dumps({"recommended": None, "rows": rows}))
    given = ("target.model=m", f"run_dir={tmp_path}")
    text = run_command.next_steps(Run(load_recipe(DEMO_RECIPE, given), DEMO_RECIPE, given))
    assert f"toolkit serve {how}   #" in text and "--draft" not in text.replace("--draft ngram", "")
