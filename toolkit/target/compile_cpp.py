"""C++ of ours as a library of this process: compiled once a machine, kept in the cache, loaded by the next start.

Python hands such a library addresses. It uses the OpenMP that PyTorch uses, so that both share one set of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from toolkit.log import get_logger
from toolkit.target.cache import build_once, cache_root

log = get_logger(__name__)

LIBRARY = "library.so"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
TORCH = Path(torch.__file__).parent


def compiler() -> str | None:
    """The C++ compiler that $CXX names, else the system's; None where it is not there."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """The instructions that this CPU has; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(flags.partition(":")[2].split()))


def load_cpp(source: Path) -> ctypes.CDLL | None:
    """The library of one C++ file; None, and the log says why, where there is no compiler or it fails.

    Its symbols are seen by libraries that are loaded later, as the compiled layers' programs are.
    """
    key = hashlib.sha256(repr((source.read_text(), torch.__version__, cpu_flags(), FLAGS)).encode()).hexdigest()[:32]
    folder = cache_root() / "compiled" / f"{source.stem}-{key}"
    if not folder.is_dir() and compiler() is None:
        log.info(
            "no C++ compiler: %s is not compiled, and PyTorch's own products are slower; install g++ or set CXX",
            source.name,
        )
        return None
    try:
        build_once(folder, lambda made: _compile(source, made / LIBRARY))
        return ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[-200:])
        log.warning("%s cannot be compiled (%s); PyTorch's own products take its place", source.name, said)
    except OSError as error:
        log.warning("%s cannot be loaded (%s); PyTorch's own products take its place", source.name, error)
    return None


def _compile(source: Path, library: Path) -> None:
    program = compiler()
    assert program is not None, "who calls has looked"
    log.info("compiling %s for this CPU, once", source.name)
    compiled = library.with_suffix(".o")
    _run(program, *FLAGS, f"-I{TORCH / 'include'}", "-c", str(source), "-o", str(compiled))
    links = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", openmp_of_torch() or "-fopenmp"]
    _run(program, "-shared", str(compiled), *links, "-o", str(library))
    compiled.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def openmp_of_torch() -> str | None:
    """The file of the OpenMP library that this process has loaded; None where there is none, or none to be seen."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$", mapped, re.MULTILINE)
    return found[1] if found else None
