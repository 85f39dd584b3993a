"""Skip, resume, redo: decided from manifests alone, whatever moment a run was killed at; and progress on stderr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.log import Progress
from toolkit.pipeline import stages as module
from toolkit.pipeline.stages import PipelineError, Stage, read_manifest, record_done, run_stages


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours may see it."""


@dataclass
class House:
    """Three stages a -> b -> c in a run folder; `log`: which worked, `partial`: what each found of an earlier try."""

    root: Path
    size: int = 1
    killed: str | None = None
    log: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    partial: dict[str, str] = field(default_factory=dict)

    def stages(self) -> list[Stage]:
        def work(name: str, source: Path | None) -> Callable[[], str]:
            def do() -> str:
                self.log.append(name)
                half = self.root / name / "half.txt"
                self.partial[name] = half.read_text() if half.exists() else ""
                half.write_text(f"half of {name}")
                if self.killed == name:
                    raise Killed
                text = f"{name}{self.size if name == 'b' else ''}({source.read_text() if source else ''})"
                (self.root / name / "out.txt").write_text(text)
                return f"{len(text)} letters"

            return do

        def stage(name: str, source: str | None) -> Stage:
            path = self.root / source / "out.txt" if source else None
            inputs = {f"{source}/out.txt": path} if path else {}
            settings = {"b": {"size": self.size}} if name == "b" else {}
            return Stage(name, name, (f"{name}/out.txt",), settings, lambda: inputs, work(name, path))

        return [stage("a", None), stage("b", "a"), stage("c", "b")]

    def run(self, **options: str) -> list[str]:
        """Stages that worked in this run."""
        self.log.clear()
        self.said.clear()
        run_stages(self.root, self.stages(), **options)
        return list(self.log)

    def kill_in(self, name: str) -> None:
        self.killed = name
        with pytest.raises(Killed):
            self.run()
        self.killed = None

    def told(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    house = House(tmp_path / "run")
    monkeypatch.setattr(module, "say", house.said.append)
    return house


def test_second_run_skips_everything(house: House) -> None:
    """README promises that the same command again ends in seconds."""
    assert house.run() == ["a", "b", "c"]
    assert house.run() == []
    assert house.told().count("skipped, up to date (") == 3
    manifest = read_manifest(house.root / "b" / "manifest.json")
    assert manifest is not None and manifest.status == "done" and manifest.versions["torch"]


def test_killed_stage_resumes_over_its_own_files(house: House) -> None:
    """A kill must cost the work of one batch, not the stage; and finished stages stay finished."""
    house.kill_in("b")
    assert house.run() == ["b", "c"]
    assert house.partial["b"] == "half of b" and "resumed" in house.told()
    assert (house.root / "c" / "out.txt").read_text() == "c(b1(a()))"
    assert house.run() == []


def test_changed_setting_redoes_its_stage_and_all_after(house: House) -> None:
    """Files of two settings in one folder would be neither's result."""
    house.run()
    house.size = 2
    assert house.run() == ["b", "c"]
    assert "b.size changed from 1 to 2" in house.told()
    assert house.partial["b"] == "", "the new settings were mixed with the old ones' files"
    assert (house.root / "c" / "out.txt").read_text() == "c(b2(a()))"
    kept = sorted(path.read_text() for path in house.root.glob("replaced/*/*/out.txt"))
    assert kept == ["b1(a())", "c(b1(a()))"]


def test_kill_after_a_change_leads_to_the_same_end(house: House) -> None:
    """Later stages lose their manifests before the changed stage works, so a kill there cannot leave them `done`."""
    house.run()
    house.size = 2
    house.kill_in("b")
    assert not (house.root / "c" / "manifest.json").exists()
    assert house.run() == ["b", "c"] and house.partial["b"] == "half of b"
    assert (house.root / "c" / "out.txt").read_text() == "c(b2(a()))"


def test_changed_input_file_redoes_what_reads_it(house: House) -> None:
    """Answers to prompts that somebody edited since are no answers. A touched file with equal bytes is no change."""
    house.run()
    out = house.root / "a" / "out.txt"
    out.write_text(out.read_text())
    assert house.run() == []
    out.write_text("A()")
    assert house.run() == ["b", "c"]
    assert "a/out.txt has other contents" in house.told()


def test_force_and_until(house: House) -> None:
    """--force redoes from a stage on, --until ends after one."""
    assert house.run(until="b") == ["a", "b"]
    assert house.run(force="b", until="b") == ["b"]
    assert house.run(force="b") == ["b", "c"]
    assert house.run(only="c") == []
    with pytest.raises(PipelineError, match="no such stage; the stages are a, b, c"):
        house.run(force="d")


def test_files_without_manifest_are_moved_aside(house: House) -> None:
    """Nobody knows which settings they were made with, unless the stage can tell by itself (training by hand)."""
    (house.root / "a").mkdir(parents=True)
    (house.root / "a" / "half.txt").write_text("a stranger's")
    knowing = replace(house.stages()[0], self_checking=True)
    run_stages(house.root, [knowing])
    assert house.partial["a"] == "a stranger's" and "if they fit" in house.told()
    (house.root / "a" / "manifest.json").unlink()
    (house.root / "a" / "half.txt").write_text("a stranger's")
    assert house.run() == ["a", "b", "c"] and house.partial["a"] == ""
    assert [path.read_text() for path in house.root.glob("replaced/*/a/half.txt")] == ["a stranger's"]


def test_missing_input_says_what_to_run(house: House) -> None:
    """`toolkit rollouts` before any prompts."""
    with pytest.raises(PipelineError, match="stage b needs .*a/out.txt"):
        house.run(only="b")


def test_two_runs_in_one_folder_are_refused(house: House) -> None:
    """Two writers would tear each other's lines."""
    inner: list[str] = []

    def work() -> str:
        with pytest.raises(PipelineError, match="another toolkit process"):
            house.run()
        inner.append("refused")
        (house.root / "a" / "out.txt").write_text("a")
        return "done"

    run_stages(house.root, [replace(house.stages()[0], work=work)])
    assert inner == ["refused"]


def test_what_another_command_finished_is_done(house: House) -> None:
    """A training that `accelerate launch` finished would be trained again, or refused."""
    house.run(until="a")
    out = house.root / "b" / "out.txt"
    out.parent.mkdir()
    out.write_text("by hand")
    record_done(house.root, house.stages()[1], "by hand", 5.0)
    assert house.run() == ["c"] and "skipped, up to date (by hand" in house.told()


def test_resumed_work_is_shown_but_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the 500 old lines counted as this second's work, the estimate would promise seconds for minutes."""
    bars: list[Progress] = []

    def remembered(*arguments: Any) -> Progress:
        bars.append(Progress(*arguments))
        return bars[-1]

    monkeypatch.setattr(module, "Progress", remembered)
    with module.progress_bar("rollouts", "conversation", 640, "tokens") as show:
        show(501, 640, 12)
        show(502, 640, 3400)
        assert bars[0].initial == 500
    assert capsys.readouterr().err.startswith("rollouts: 502/640 conversations, 00:00 min, ")
