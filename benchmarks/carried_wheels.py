"""Unpack wheels that were carried to a machine without a network, as far as their packages are not installed there.

    python benchmarks/carried_wheels.py WHEELS SITE [--replace transformers ...]

SITE then goes to the head of PYTHONPATH. Unpacked, not installed: no pip is needed, and the machine's own environment
stays as it is. --replace: packages that are taken from the wheels although another release is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path


def package_of(wheel: Path) -> str:
    """The package's name as the index writes it: lower case, with hyphens."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def unpack(wheels: Path, site: Path, replace: Collection[str] = ()) -> list[str]:
    """Unpack what is missing; returns its packages. What is in `site` already, from an earlier call, is kept."""
    taken = []
    installed = {re.sub(r"[-_.]+", "-", one.name).lower() for one in metadata.distributions() if one.name}
    installed |= {package_of(path) for path in site.glob("*.dist-info")}
    for wheel in sorted(wheels.glob("*.whl")):
        package = package_of(wheel)
        unpacked = any(package_of(path) == package for path in site.glob("*.dist-info"))
        if package not in installed or (package in replace and not unpacked):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            taken.append(package)
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("site", type=Path)
    parser.add_argument("--replace", nargs="*", default=[], metavar="PACKAGE")
    args = parser.parse_args(argv)
    args.site.mkdir(parents=True, exist_ok=True)
    print("from the carried wheels:", ", ".join(unpack(args.wheels, args.site, args.replace)) or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
