"""Skip, resume, redo: decided from manifests alone, whatever moment a run was killed at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from toolkit.pipeline import stages as manifest
from toolkit.pipeline.stages import Manifest, PipelineError, Stage, read_manifest, record_done, run_stages
from toolkit.weights import WeightsError


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
        run_stages(self.root, self.stages(), say=self.said.append, **options)
        return list(self.log)

    def kill_in(self, name: str) -> None:
        self.killed = name
        with pytest.raises(Killed):
            self.run()
        self.killed = None

    def told(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "run")


def test_second_run_skips_everything(house: House) -> None:
    """README promises that the same command again ends in seconds."""
    assert house.run() == ["a", "b", "c"]
    assert house.run() == []
    assert house.told().count("skipped, up to date (") == 3
    manifest = read_manifest(house.root / "b" / "manifest.json")
    assert manifest is not None and manifest.status == "done" and manifest.versions["torch"]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_killed_stage_resumes_over_its_own_files(house: House, name: str) -> None:
    """A kill must cost the work of one batch, not the stage; and finished stages stay finished."""
    house.kill_in(name)
    assert house.run() == ["a", "b", "c"]["abc".index(name) :]
    assert house.partial[name] == f"half of {name}" and "resumed" in house.told()
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


def test_changed_setting_of_a_killed_stage_starts_afresh(house: House) -> None:
    """The half-written files of the old settings must not be continued with the new ones."""
    house.kill_in("b")
    house.size = 2
    assert house.run() == ["b", "c"]
    assert house.partial["b"] == ""
    assert [path.read_text() for path in house.root.glob("replaced/*/b/half.txt")] == ["half of b"]


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


def test_lost_output_is_made_again(house: House) -> None:
    """A `done` manifest beside a deleted result must not be believed."""
    house.run()
    (house.root / "b" / "out.txt").unlink()
    assert house.run() == ["b", "c"] and "b/out.txt is gone" in house.told()


def test_lost_output_of_a_stage_that_resumes_costs_little(house: House) -> None:
    """A deleted ckpt/ must not throw away the training states that can write it again, nor its measurement."""
    house.run()
    (house.root / "b" / "out.txt").unlink()
    stages = [replace(stage, self_checking=True) for stage in house.stages()]
    outcomes = run_stages(house.root, stages, say=house.said.append)
    assert [one.worked for one in outcomes] == [False, True, False] and house.partial["b"] == "half of b"


def test_files_without_manifest_are_moved_aside(house: House) -> None:
    """Nobody knows which settings they were made with, unless the stage can tell by itself (training by hand)."""
    (house.root / "a").mkdir(parents=True)
    (house.root / "a" / "half.txt").write_text("a stranger's")
    knowing = replace(house.stages()[0], self_checking=True)
    run_stages(house.root, [knowing], say=house.said.append)
    assert house.partial["a"] == "a stranger's" and "if they fit" in house.told()
    (house.root / "a" / "manifest.json").unlink()
    (house.root / "a" / "half.txt").write_text("a stranger's")
    assert house.run() == ["a", "b", "c"] and house.partial["a"] == ""
    assert [path.read_text() for path in house.root.glob("replaced/*/a/half.txt")] == ["a stranger's"]


def test_missing_input_says_what_to_run(house: House) -> None:
    """`toolkit rollouts` before any prompts."""
    with pytest.raises(PipelineError, match="stage b needs .*a/out.txt"):
        house.run(only="b")


def test_stage_that_leaves_no_output_is_an_error(house: House) -> None:
    """Otherwise its manifest would say done, and the next stage would fail in its place."""
    lazy = replace(house.stages()[0], work=lambda: "nothing")
    with pytest.raises(PipelineError, match="out.txt is not in"):
        run_stages(house.root, [lazy], say=house.said.append)
    assert read_manifest(house.root / "a" / "manifest.json").status == "running"  # type: ignore[union-attr]


def test_two_runs_in_one_folder_are_refused(house: House) -> None:
    """Two writers would tear each other's lines."""
    inner: list[str] = []

    def work() -> str:
        with pytest.raises(PipelineError, match="another toolkit process"):
            house.run()
        inner.append("refused")
        (house.root / "a" / "out.txt").write_text("a")
        return "done"

    run_stages(house.root, [replace(house.stages()[0], work=work)], say=house.said.append)
    assert inner == ["refused"]


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    """A manifest of another version or cut in half must not be taken for a missing one."""
    path = tmp_path / "manifest.json"
    path.write_text('{"stage": "a"')
    with pytest.raises(WeightsError, match="manifest.json is not valid JSON"):
        read_manifest(path)
    path.write_text(json.dumps({"stage": "a", "colour": "red"}))
    with pytest.raises(WeightsError, match="remove it to redo the stage"):
        read_manifest(path)
    Manifest("a", "done", {}, {}).write(path)
    assert read_manifest(path) == Manifest("a", "done", {}, {})


def test_a_file_of_several_stages_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large target on disk is an input of five stages; each hashing takes minutes. A changed file is read again."""
    read: list[Path] = []
    monkeypatch.setattr(manifest, "sha256_file", lambda path: read.append(path) or path.read_text())
    path = tmp_path / "weights"
    path.write_text("one")
    assert manifest.mark_file(path) == manifest.mark_file(path) and len(read) == 1
    path.write_text("other")
    assert manifest.mark_file(path)["sha256"] == "other" and len(read) == 2


def test_what_another_command_finished_is_done(house: House) -> None:
    """A training that `accelerate launch` finished would be trained again, or refused."""
    house.run(until="a")
    out = house.root / "b" / "out.txt"
    out.parent.mkdir()
    out.write_text("by hand")
    record_done(house.root, house.stages()[1], "by hand", 5.0)
    assert house.run() == ["c"] and "skipped, up to date (by hand" in house.told()
