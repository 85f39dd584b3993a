"""The command line: quick help, errors in one line, exit statuses, and a README that does not drift."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from toolkit import cli
from toolkit.commands import run as run_command
from toolkit.errors import exit_status
from toolkit.pipeline.run import Run
from toolkit.recipe import DEMO_RECIPE, load_recipe

REPOSITORY = Path(__file__).resolve().parent.parent


def python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, **options)  # type: ignore[call-overload]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """`toolkit --help` and shell completion must not wait seconds for torch; nor must the help of a command."""
    code = """
import sys
from toolkit.cli import COMMANDS, main
assert main(["--help"]) == 0 and not {"torch", "numpy", "yaml", "rich"} & set(sys.modules)
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit:
        pass
    assert "torch" not in sys.modules, name
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for name, text in cli.COMMANDS.items():
        assert f"  {name} " in done.stdout and text in done.stdout
        assert f"usage: toolkit {name}" in done.stdout


def test_the_package_loads_torch_only_when_the_engine_is_asked_for() -> None:
    """`import toolkit` is part of every command; `from toolkit import LLM` is what needs the engine."""
    code = (
        "import sys, toolkit; light = 'torch' not in sys.modules; from toolkit import LLM, SamplingParams; "
        "light &= 'transformers' not in sys.modules; "
        "print(light, 'torch' in sys.modules, LLM.__name__, set(toolkit.__all__) <= set(dir(toolkit)))"
    )
    assert python(code).stdout == "True True LLM True\n"


def test_user_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A traceback suggests a bug in the program; these one-line errors say what to do."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\ntarget: {model: tiny}\ntrain: {max_step: 3}\n")
    for arguments, message in (
        (["run", str(recipe)], "did you mean train.max_steps?"),
        (
            ["run", str(recipe), "train={}", "prompts.sources=[absent.jsonl]"],
            "absent.jsonl, which does not exist; correct",
        ),
        (["rnu"], "did you mean run?"),
        (["bench", "acceptance", "--draft", str(tmp_path)], "is no draft directory"),
    ):
        assert cli.main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("toolkit: error: ") and error.count("\n") == 1 and message in error, error


@pytest.mark.parametrize("command", [["check"], ["bench", "acceptance"]])
def test_a_shortened_flag_is_no_other_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`bench acceptance --n 2` was read as `--no-check`."""
    with pytest.raises(SystemExit):
        cli.main([*command, "--draf", "x"])
    assert "--draf" in capsys.readouterr().err


def test_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts distinguish Ctrl-C from failure by the status 130."""

    def interrupted(args: SimpleNamespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "run", interrupted)
    assert cli.main(["run", "r.yaml"]) == 130
    assert "files written so far are kept" in capsys.readouterr().err


def test_the_next_commands_keep_what_the_user_set(tmp_path: Path) -> None:
    """The printed line would serve the recipe's target in place of the one that was measured."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "measured.json").write_text('{"recommended": null}')
    given = ("target.model=org/x", "target.chat_template=none", f"run_dir={tmp_path}")
    said = run_command.next_steps(Run(load_recipe(DEMO_RECIPE, given), DEMO_RECIPE, given))
    assert "toolkit serve --target org/x --chat-template=none" in said
    (tmp_path / "ckpt" / "measured.json").write_text('{"recommended": "adaptive"}')
    said = run_command.next_steps(Run(load_recipe(DEMO_RECIPE, given), DEMO_RECIPE, given))
    assert "toolkit serve --draft" in said and "toolkit chat" not in said, "a base model takes no chats"


@pytest.mark.parametrize(
    "error",
    [
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
