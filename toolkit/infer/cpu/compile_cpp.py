"""Compiles our C++ files and loads them as shared libraries.

A file is compiled once per machine; the cache keeps the library for later starts. Python passes addresses to it. It
links the OpenMP library of PyTorch, so that both share one set of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from toolkit.errors import TargetError
from toolkit.log import get_logger
from toolkit.targets.cache import build_once, cache_root
from toolkit.threads import cpu_info

log = get_logger(__name__)

LIBRARY = "library.so"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
TORCH = Path(torch.__file__).parent
# All files may include them.
HEADERS = tuple(Path(__file__).with_name(name) for name in ("amx_tiles.h", "attention.h", "product.h", "vectors.h"))
INSTEAD = "PyTorch's slower operators are used instead"


def compiler() -> str | None:
    """The path of the C++ compiler that $CXX names, else of the system's default; None if it is not installed."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def load_cpp(source: Path) -> ctypes.CDLL | None:
    """The library of one C++ file; None on a CPU without AVX2 and FMA, which vectors.h needs, or, with the reason in
    the log, if the file cannot be compiled or loaded."""
    if not has_vectors():
        return None
    openmp = openmp_of_torch()
    try:
        texts = [file.read_text(encoding="utf-8") for file in (source, *HEADERS)]
        decides = (texts, torch.__version__, cpu_info().get("flags"), FLAGS, Path(openmp or "").name)
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
        folder = cache_root() / "compiled" / f"{source.stem}-{key}"
        if not folder.is_dir() and compiler() is None:
            log.info("no C++ compiler: %s is not compiled, and %s; install g++ or set CXX", source.name, INSTEAD)
            return None
        build_once(folder, lambda made: _compile(source, made / LIBRARY, openmp))
        return ctypes.CDLL(str(folder / LIBRARY))
    except subprocess.CalledProcessError as error:
        why = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[-200:])
        log.warning("%s cannot be compiled by %s (%s); %s", source.name, compiler(), why, INSTEAD)
    except (OSError, TargetError) as error:
        log.warning("%s cannot be compiled or loaded (%s); %s", source.name, error, INSTEAD)
    return None


def has_vectors() -> bool:
    """Whether this CPU has the vectors that vectors.h needs (AVX2 and FMA)."""
    return {"avx2", "fma"} <= {*cpu_info().get("flags", "").split()}


def _compile(source: Path, library: Path, openmp: str | None) -> None:
    program = compiler()
    assert program is not None, "load_cpp has checked"
    log.info("compiling %s for this CPU, once", source.name)
    compiled = library.with_suffix(".o")
    _run(program, *FLAGS, f"-I{HEADERS[0].parent}", "-c", str(source), "-o", str(compiled))
    links = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", openmp or "-fopenmp", "-Wl,-z,defs"]
    _run(program, "-shared", str(compiled), *links, "-o", str(library))
    compiled.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def openmp_of_torch() -> str | None:
    """The path of the OpenMP library that PyTorch uses; None if it cannot be found.

    Other packages may load OpenMP libraries too. PyTorch's is in its own folders, or is the only one.
    """
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$", mapped, re.MULTILINE)
    beside = [path for path in found if Path(path).parent in (TORCH / "lib", TORCH.with_name("torch.libs"))]
    return next(iter(beside or found), None)
