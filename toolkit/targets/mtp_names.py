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
