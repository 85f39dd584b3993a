"""What `toolkit check` says of a head and of four spoilt copies of it.

    python benchmarks/checked_heads.py --draft runs/NAME/ckpt [--limit 16] [--max-tokens 32]

Writes benchmarks/results/check-<head>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_folder import leave

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.check import CheckedHead, findings, open_checked
from toolkit.bench.checked_head import FAILED, SKIPPED
from toolkit.bench.records import command_line, make_record
from toolkit.infer.load.config import EngineConfig
from toolkit.threads import physical_cores, users_threads
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import load_tensors, read_json, save_tensors, write_json

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def aux_ids_off_by_one(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["toolkit"]["aux_layer_ids"] = [one + 1 for one in config["toolkit"]["aux_layer_ids"]]


def another_template(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The check compares hashes, so another hash is another template."""
    config["toolkit"]["target"]["template_sha256"] = "0" * 64


def map_of_another_target(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Random ids, with those that end an answer, and no hash that would tell."""
    config["toolkit"].pop("token_map_sha256", None)
    size, vocab_size = len(tensors["d2t"]), len(tensors["t2d"])
    special = (tensors["d2t"] + torch.arange(size))[:64].tolist()
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    token_map = TokenMap.from_ids(list(dict.fromkeys([*special, *order]))[:size], vocab_size)
    tensors |= {"d2t": token_map.d2t, "t2d": token_map.t2d}


def a_nan(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = math.nan


HEADS: dict[str, Change | None] = {
    "as trained": None,
    "aux layer ids off by one": aux_ids_off_by_one,
    "another chat template": another_template,
    "map of another target, no hash": map_of_another_target,
    "one NaN in a weight": a_nan,
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, type=Path, help="an eagle3 draft directory")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    torch.set_num_threads(int(users_threads() or physical_cores()))
    rows, described = [], {}
    for name, change in HEADS.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            draft = shutil.copytree(args.draft, Path(folder) / "head")
            if change is not None:
                config, tensors = read_json(draft / "config.json"), load_tensors(draft / "model.safetensors")
                change(config, tensors)
                write_json(draft / "config.json", config)
                save_tensors(draft / "model.safetensors", tensors)
            head = open_checked(EngineConfig(draft=str(draft), dtype="float32"), args.limit, args.max_tokens)
            found = dict(findings(head))
        failed = {check: one.detail for check, one in found.items() if one.status == FAILED}
        rows.append(
            {
                "head": name,
                "exit_status": int(bool(failed)),
                "failed": failed,
                "skipped": sum(one.status == SKIPPED for one in found.values()),
                "checks": len(found),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
        print(rows[-1], flush=True)
        if isinstance(head, CheckedHead) and not described:
            described = {"target": describe_target(head.target), "draft": describe_draft(head.draft)}
    settings = {"limit": args.limit, "max_tokens": args.max_tokens}
    leave(make_record("check", command_line(), settings, rows, **described), f"check-{args.draft.name}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
