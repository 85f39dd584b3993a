"""The command lines that serve an exported head with other engines."""

from __future__ import annotations

import json
import shlex
from typing import Any, NamedTuple

from toolkit.checkpoint.gguf_head import MODEL_FILE
from toolkit.heads.draft_head import head_class
from toolkit.heads.dspark import DSparkConfig
from toolkit.heads.head_config import EngineNames, HeadConfig
from toolkit.targets.facts import TargetFacts


class Shape(NamedTuple):
    """What is drafted per step: levels, branches, nodes verified with the root (SGLang's three numbers)."""

    num_steps: int
    top_k: int
    num_draft_tokens: int


DFLASH = EngineNames(sglang="DFLASH", vllm="dflash")


def is_dflash(config: HeadConfig) -> bool:
    """Whether other engines call a head DFlash: no Markov bias, and the first place drafts nothing."""
    return isinstance(config, DSparkConfig) and not config.markov_rank and not config.sample_from_anchor


def launch_line(to: str, config: HeadConfig, facts: TargetFacts, directory: str, shape: Shape) -> str:
    """One command (for eagle: Python) that serves `facts`'s target with the head of `config` in `directory`."""
    revision = [] if facts.revision is None or facts.source.startswith("/") else ["--revision", facts.revision]
    if to == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", facts.source, *revision]
        words += sglang_speculation(config.kind, directory, shape, config)
    elif to == "vllm":
        settings = vllm_speculation(config.kind, directory, shape, config)
        words = ["vllm", "serve", facts.source, *revision, "--speculative-config", json.dumps(settings)]
    elif to == "speculators":
        words = ["vllm", "serve", directory]
    elif to == "gguf":
        target = facts.name if facts.name.endswith(".gguf") else "TARGET.gguf"
        words = ["llama-server", "-m", target, "-md", f"{directory}/{MODEL_FILE}", "--spec-type", "draft-eagle3"]
        words += ["--spec-draft-n-max", str(shape.num_steps)]
    elif to == "toolkit":
        words = ["toolkit", "serve", "--draft", directory]
    else:
        # Its depth counts the levels after the first one.
        depth = shape.num_steps - 1
        return (
            f"EaModel.from_pretrained(base_model_path={facts.source!r}, ea_model_path={directory!r}, "
            f"use_eagle3={_names(config.kind).use_eagle3}, depth={depth}, top_k={shape.top_k}, "
            f"total_token={shape.num_draft_tokens})"
        )
    return shlex.join(words)


def sglang_speculation(kind: str, directory: str | None, shape: Shape, config: HeadConfig | None = None) -> list[str]:
    """SGLang's words for a head; without a directory: the MTP layers of the target's own checkpoint. config: the
    head's, where it is known."""
    names = _names(kind, config)
    words = ["--speculative-algorithm", names.sglang]
    if directory is not None:
        words += ["--speculative-draft-model-path", directory]
    if issubclass(head_class(kind).config_class, DSparkConfig):
        # A block is one step; SGLang counts the root among DFlash's places, not among DSpark's.
        flag, more = ("dflash", 1) if names == DFLASH else ("dspark", 0)
        return [*words, f"--speculative-{flag}-block-size", str(_drafts(shape, config) + more)]
    words += ["--speculative-num-steps", str(shape.num_steps), "--speculative-eagle-topk", str(shape.top_k)]
    return [*words, "--speculative-num-draft-tokens", str(shape.num_draft_tokens)]


def vllm_speculation(
    kind: str, directory: str | None, shape: Shape, config: HeadConfig | None = None
) -> dict[str, Any]:
    """vLLM's --speculative-config for a head; arguments as of `sglang_speculation`."""
    model = {} if directory is None else {"model": directory}
    return {"method": _names(kind, config).vllm, **model, "num_speculative_tokens": _drafts(shape, config)}


def _drafts(shape: Shape, config: HeadConfig | None) -> int:
    """A chain's drafts; of a block all, as it was trained: with fewer masks these engines compute another block."""
    return shape.num_steps if config is None else config.drafts_at_once or shape.num_steps


def _names(kind: str, config: HeadConfig | None = None) -> EngineNames:
    names = head_class(kind).config_class.engine_names
    assert names is not None, f"no other engine serves {kind} heads"
    return DFLASH if config is not None and is_dflash(config) else names
