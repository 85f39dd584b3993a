"""Running the stages of a pipeline: skip what is up to date, resume what was cut off, redo what changed.

A stage's manifest, `<run>/<stage>/manifest.json`, says what it was made from: status ("running" until the stage's last
byte is written, then "done"), the settings that decide its result, marks of its input files, versions, and times. For
each stage, in order, it is compared with what the recipe and the input files are now:

    no manifest, no files         run it
    no manifest, but files        set them aside (what they were made from is unknown), run it; a stage that checks its
                                  partial files itself runs over them, and refuses those of other settings
    settings or inputs changed    set this stage's files and those of all later stages aside, run it
    same, status "running"        it was interrupted: run it again over its own partial files, which it continues
    same, status "done"           skip it, unless a result is gone

Nothing is deleted: what is set aside moves to <run>/replaced/<time>/. A stage's own folder, with its manifest, moves
last, and later stages move before earlier ones, so a kill at any moment leaves a state that leads to the same decision.
Nothing here imports torch: a run that is up to date ends in a moment.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from toolkit.log import Progress
from toolkit.weights import read_json, sha256_file, write_json

FILE_NAME = "manifest.json"
FileMark = dict[str, Any]  # {"sha256", "size" in bytes, "mtime_ns"}


@contextmanager
def progress_bar(what: str, unit: str, total: int | None = None, note: str = "") -> Iterator[Callable[..., None]]:
    """Yields the callback. Work before the first call counts as done by an earlier session, and is not timed.

    The callback's third argument is a count, shown beside the bar with `note`.
    """
    with Progress(total, what, unit) as bar:
        first = True

        def show(done: int, total: int, count: int | None = None) -> None:
            nonlocal first
            if first:
                bar.initial = bar.n = max(0, done - 1)
                first = False
            bar.total = total
            bar.update(done - bar.n, None if count is None else f"{count:,} {note}")

        yield show


@dataclass
class Manifest:
    """The record of one stage. `seconds` is the time of the session that ended it, `sessions` counts the starts."""

    stage: str
    status: Literal["running", "done"]
    settings: dict[str, Any]
    inputs: dict[str, FileMark]
    versions: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    finished: str | None = None
    seconds: float = 0.0
    sessions: int = 1
    headline: str = ""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`; None when there is none."""
    return Manifest(**read_json(path)) if path.is_file() else None


def mark_file(path: Path, known: FileMark | None = None) -> FileMark:
    """Size, time and hash of a file. A file whose size and time equal `known`'s is not read again."""
    stat = path.stat()
    mark = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if known and mark.items() <= known.items():
        return known
    return {"sha256": _sha256(path.resolve(), *mark.values()), **mark}


@cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    """Hash of a file as it is now, computed once: in one run five stages ask for the same target's files."""
    return sha256_file(path)


def differences(old: Manifest, settings: Mapping[str, Any], inputs: Mapping[str, FileMark]) -> list[str]:
    """Why a stage made with `old` is out of date for these settings and inputs; empty when it is up to date."""
    before, now = flatten(old.settings), flatten(settings)
    found = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            found.append(f"{key} changed from {before.get(key)} to {now.get(key)}")
    for name in sorted(old.inputs.keys() | inputs.keys()):
        if name not in inputs or name not in old.inputs:
            found.append(f"{name} is {'no longer' if name in old.inputs else 'now'} an input")
        elif old.inputs[name]["sha256"] != inputs[name]["sha256"]:
            found.append(f"{name} has other contents")
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


class PipelineError(ValueError):
    """A stage cannot start or failed, or the run folder is in use. status: the exit status for the command."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Stage:
    """One stage. Paths are relative to the run folder.

    outputs: files that exist when it is done. makes: what it writes outside its own folder. settings: the part of the
    recipe that decides its result. inputs: name -> file, looked up when the stage's turn comes. work: does it, over
    partial files of its own if there are any, and returns a headline such as "640 prompts". self_checking: `work`
    raises when it finds partial files of other settings. check: raises for settings that `work` would refuse; it is
    called before files of this stage are moved, and before it or an earlier stage works.
    """

    name: str
    folder: str
    outputs: tuple[str, ...]
    settings: Mapping[str, Any]
    inputs: Callable[[], Mapping[str, Path]]
    work: Callable[[], str]
    makes: tuple[str, ...] = ()
    self_checking: bool = False
    check: Callable[[], None] = lambda: None


def say(line: str) -> None:
    """Print a line about a stage on stdout, at once."""
    print(line, flush=True)


def run_stages(
    run_dir: Path,
    stages: Sequence[Stage],
    *,
    only: str | None = None,
    force: str | None = None,
    until: str | None = None,
) -> None:
    """Bring the stages up to date, in order: `only` one of them, or up to and with `until`; `force` redoes from one on.

    Raises `PipelineError`: unknown stage name, missing input, folder in use, or a stage that failed.
    """
    names = [stage.name for stage in stages]
    for option, wanted in (("--force", force), ("--until", until), ("stage", only)):
        if wanted is not None and wanted not in names:
            raise PipelineError(f"{option} {wanted}: no such stage; the stages are {', '.join(names)}")
    with _lock(run_dir):
        for position, stage in enumerate(stages):
            if only in (None, stage.name):
                if stage.name == force:
                    _check(stages[position:])
                    _set_aside(run_dir, stages[position:])
                label = f"[{position + 1}/{len(stages)}] {stage.name:<10}"
                _bring_up_to_date(run_dir, stages[position:], label)
            if stage.name == until:
                break


def _bring_up_to_date(run_dir: Path, stages: Sequence[Stage], label: str) -> None:
    stage, path = stages[0], _manifest_path(run_dir, stages[0])
    manifest = read_manifest(path)
    marks = _marks(run_dir, stage, manifest)
    reason = _reason(run_dir, stage, manifest, marks)
    if reason is None:
        assert manifest is not None, "a stage without a manifest has a reason to work"
        if marks != manifest.inputs:  # same contents with another time: spare the next run the hashing
            manifest.inputs = marks
            manifest.write(path)
        made = (manifest.finished or "")[:16].replace("T", " ")
        say(f"{label} skipped, up to date ({manifest.headline}, {made})")
        return
    why, over_its_files = reason
    _check(stages)
    say(f"{label} {why}")
    if not over_its_files:
        _set_aside(run_dir, stages)
    if manifest is None or manifest.status == "done" or not over_its_files:
        manifest = Manifest(stage.name, "running", dict(stage.settings), marks, started=_now(), sessions=0)
    manifest.sessions += 1
    manifest.write(path)
    begin = time.monotonic()
    headline = stage.work()
    missing = _missing(run_dir, stage)
    if missing:
        raise PipelineError(f"stage {stage.name} ended, but {', '.join(missing)} is not in {run_dir}")
    _write_done(path, manifest, headline, time.monotonic() - begin)
    say(f"{label} done in {manifest.seconds / 60:.1f} min ({headline})")


def _marks(run_dir: Path, stage: Stage, manifest: Manifest | None) -> dict[str, FileMark]:
    inputs = stage.inputs()
    for path in inputs.values():
        if not path.is_file():
            remedy = "run the stage before it" if path.is_relative_to(run_dir) else "correct the path in the recipe"
            raise PipelineError(f"stage {stage.name} needs {path}, which does not exist; {remedy}")
    known = manifest.inputs if manifest else {}
    return {name: mark_file(path, known.get(name)) for name, path in inputs.items()}


def _reason(
    run_dir: Path, stage: Stage, manifest: Manifest | None, marks: Mapping[str, FileMark]
) -> tuple[str, bool] | None:
    """Why a stage works, and whether over the files that it has; None: it is up to date."""
    if manifest is None:
        existing = next((path for path in _places(run_dir, stage) if _holds_files(path)), None)
        if existing is None:
            return "started", True
        if stage.self_checking:
            return f"goes on with the files in {existing}, if they fit", True
        return f"{existing} has files but no manifest: starting afresh", False
    reasons = differences(manifest, stage.settings, marks)
    if reasons:
        more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
        return f"redone, because {'; '.join(reasons[:3])}{more}", False
    if manifest.status != "done":
        return f"was cut off (started {manifest.started[:16].replace('T', ' ')}): resumed", True
    missing = _missing(run_dir, stage)
    if missing:
        return f"{'goes on' if stage.self_checking else 'redone'}, because {missing[0]} is gone", stage.self_checking
    return None


def _missing(run_dir: Path, stage: Stage) -> list[str]:
    return [name for name in stage.outputs if not (run_dir / name).is_file()]


def record_done(run_dir: Path, stage: Stage, headline: str, seconds: float) -> None:
    """Write the manifest of a stage whose work another command has done: the next run skips it."""
    manifest = Manifest(stage.name, "running", dict(stage.settings), _marks(run_dir, stage, None), started=_now())
    _write_done(_manifest_path(run_dir, stage), manifest, headline, seconds)


def _write_done(path: Path, manifest: Manifest, headline: str, seconds: float) -> None:
    from toolkit.bench.records import git_commit, versions  # loads torch; a run that is up to date does without

    manifest.status, manifest.headline, manifest.finished, manifest.seconds = "done", headline, _now(), seconds
    manifest.versions = {**versions(), "commit": git_commit()}
    manifest.write(path)


def _check(stages: Sequence[Stage]) -> None:
    for stage in stages:
        stage.check()


def _set_aside(run_dir: Path, stages: Sequence[Stage]) -> None:
    """Move the files of these stages to <run>/replaced/<time>, the last stage first, each one's manifest last."""
    attic = run_dir / "replaced" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    moved = False
    for stage in reversed(stages):
        for place in _places(run_dir, stage):
            if place.exists():
                to = attic / place.relative_to(run_dir)
                to.parent.mkdir(parents=True, exist_ok=True)
                place.rename(to)
                moved = True
    if moved:
        say(f"      earlier files of {', '.join(stage.name for stage in stages)} are now in {attic}")


def _places(run_dir: Path, stage: Stage) -> list[Path]:
    return [run_dir / name for name in (*stage.makes, stage.folder)]


def _holds_files(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(entry.is_file() for entry in path.rglob("*")))


def _manifest_path(run_dir: Path, stage: Stage) -> Path:
    return run_dir / stage.folder / FILE_NAME


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """One run at a time in a folder; the kernel frees the lock when the process ends, however it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"another toolkit process works in {run_dir}; wait for it, or choose another run_dir"
            ) from None
        yield
