"""The names that MTP modules have in the checkpoints of targets: their tensors, and the record of a written one."""

from __future__ import annotations

import re

# DeepSeek stores its MTP layers after the last decoder layer; other families give them names of their own.
NAMED_MTP = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block)\.((layers\.)?\d+(?=\.))?")
STITCHED = "stitched.json"  # in copies of a target that `toolkit export --to native` writes
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_mtp_name(name: str, n_layers: int) -> bool:
    """Whether a tensor of a target with `n_layers` decoder layers belongs to an MTP module."""
    layer = LAYER.search(name)
    return NAMED_MTP.search(name) is not None or (layer is not None and int(layer[2]) >= n_layers)


def native_mtp_layers(names: list[str], n_layers: int) -> list[str]:
    """Prefixes of a target's own MTP layers, from the names of its tensors; empty when it has none."""
    numbered: set[str] = set()
    modules: set[str] = set()
    for name in names:
        layer, named = LAYER.search(name), NAMED_MTP.search(name)
        if named is not None:
            # Such a module has parts outside of its layers too (mtp.fc of Qwen3-Next), which do not count as a layer.
            (modules if named[3] is None else numbered).add(name[: named.end()].rstrip("."))
        elif layer is not None and int(layer[2]) >= n_layers:
            numbered.add(name[: layer.end() - 1])
    return sorted(numbered or modules)
