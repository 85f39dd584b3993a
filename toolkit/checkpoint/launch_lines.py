"""The command lines that serve an exported head with other engines."""

from __future__ import annotations

import json
import shlex
from typing import Any, NamedTuple

from toolkit.checkpoint.gguf_head import MODEL_FILE
from toolkit.heads.head_config import EngineNames
from toolkit.heads.registry import head_class
from toolkit.targets.facts import TargetFacts


class Shape(NamedTuple):
    """What is drafted per step: levels, branches, nodes verified with the root (SGLang's three numbers)."""

    num_steps: int
    top_k: int
    num_draft_tokens: int

    @property
    def chain(self) -> int:
        """Tokens a chain of as many levels drafts: all that vLLM can be told."""
        return self.num_steps


def launch_line(to: str, kind: str, facts: TargetFacts, directory: str, shape: Shape) -> str:
    """One command (for eagle: Python) that serves `facts`'s target with the head in `directory`."""
    revision = [] if facts.revision is None or facts.source.startswith("/") else ["--revision", facts.revision]
    if to == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", facts.source, *revision]
        words += sglang_speculation(kind, directory, shape)
    elif to == "vllm":
        settings = vllm_speculation(kind, directory, shape)
        words = ["vllm", "serve", facts.source, *revision, "--speculative-config", json.dumps(settings)]
    elif to == "speculators":
        words = ["vllm", "serve", directory]
    elif to == "gguf":
        target = facts.name if facts.name.endswith(".gguf") else "TARGET.gguf"
        words = ["llama-server", "-m", target, "-md", f"{directory}/{MODEL_FILE}", "--spec-type", "draft-eagle3"]
        words += ["--spec-draft-n-max", str(shape.chain)]
    elif to == "toolkit":
        words = ["toolkit", "serve", "--draft", directory]
    else:
        # Its depth counts the levels after the first one.
        depth = shape.num_steps - 1
        return (
            f"EaModel.from_pretrained(base_model_path={facts.source!r}, ea_model_path={directory!r}, "
            f"use_eagle3={_names(kind).use_eagle3}, depth={depth}, top_k={shape.top_k}, "
            f"total_token={shape.num_draft_tokens})"
        )
    return shlex.join(words)


def sglang_speculation(kind: str, directory: str | None, shape: Shape) -> list[str]:
    """SGLang's words for a head; without a directory: the MTP layers of the target's own checkpoint."""
    words = ["--speculative-algorithm", _names(kind).sglang]
    if directory is not None:
        words += ["--speculative-draft-model-path", directory]
    words += ["--speculative-num-steps", str(shape.num_steps), "--speculative-eagle-topk", str(shape.top_k)]
    return [*words, "--speculative-num-draft-tokens", str(shape.num_draft_tokens)]


def vllm_speculation(kind: str, directory: str | None, shape: Shape) -> dict[str, Any]:
    """vLLM's --speculative-config for a head; without a directory: the MTP layers of the target's own checkpoint."""
    model = {} if directory is None else {"model": directory}
    return {"method": _names(kind).vllm, **model, "num_speculative_tokens": shape.chain}


def _names(kind: str) -> EngineNames:
    names = head_class(kind).config_class.engine_names
    assert names is not None, f"no other engine serves {kind} heads"
    return names
