"""The exact lines that serve an exported head elsewhere."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from toolkit.target.facts import TargetFacts


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
        words += ["--speculative-algorithm", "EAGLE3" if kind == "eagle3" else "EAGLE"]
        words += ["--speculative-draft-model-path", directory]
        words += ["--speculative-num-steps", str(shape.num_steps), "--speculative-eagle-topk", str(shape.top_k)]
        words += ["--speculative-num-draft-tokens", str(shape.num_draft_tokens)]
    elif to == "vllm":
        method = "eagle3" if kind == "eagle3" else "eagle"
        settings = {"method": method, "model": directory, "num_speculative_tokens": shape.chain}
        words = ["vllm", "serve", facts.source, *revision, "--speculative-config", json.dumps(settings)]
    elif to == "speculators":
        words = ["vllm", "serve", directory]
    elif to == "toolkit":
        words = ["toolkit", "serve", "--draft", directory]
    else:
        # Its depth counts the levels behind the first one.
        return (
            "EaModel.from_pretrained(base_model_path={!r}, ea_model_path={!r}, use_eagle3={}, depth={}, top_k={}, "
            "total_token={})"
        ).format(facts.source, directory, kind == "eagle3", shape.num_steps - 1, shape.top_k, shape.num_draft_tokens)
    return shlex.join(words)
