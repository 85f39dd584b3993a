"""Train draft heads for a language model, and serve the model with them by speculative decoding.

Each of these words has one meaning in code, messages and files:

target          the model whose output must be reproduced exactly
draft head      the small module we train; it proposes tokens, and the target accepts or replaces them
aux_layer_ids   indices into the target's `hidden_states`: id k is the input of layer k, the output of layer k-1.
                Default (2, n//2, n-3). Only exporters convert to other conventions
features        the target's hidden states that a draft head reads, computed while the target reads a text
token map       the target ids that the draft vocabulary keeps, ascending and unique; `d2t` contains offsets
                (target = draft + d2t[draft]), `t2d` is a bool mask over the target's vocabulary
plain decoding  the target alone writes one token a step; every speedup is measured against it, in the same run
draft step      tokens are proposed, by n-gram lookup or by a forward of the draft head for each level of the draft tree
verify step     one forward of the target over the draft tree of a request; requests that run together share the forward
draft tree      root and drafted nodes: `num_steps` levels, `top_k` branching, `num_draft_tokens` verified nodes,
                INCLUDING the root; a chain is `top_k=1`
draft shape     `num_steps,top_k,num_draft_tokens` of a draft tree: 4,1,5 is a chain of 4 drafted tokens, 4,4,16 a tree;
                or num_draft_tokens alone, the budget: 64 is a tree of 64 nodes whose depth follows from the head
adaptive        adaptive drafting: in every step the engine chooses its shape, a smaller one or nothing, by measured
                costs and running acceptance
lookup          drafts without a forward: what followed an earlier occurrence of the text's end, in the request or in
                a corpus of earlier answers
near-tie        two tokens whose scores differ by less than the rounding of bfloat16: a verify step of several tokens
                and a plain step of one may take different ones
accept_length   tokens committed per verify step, the target's own bonus token included, so at least 1. The token of
                the prefill, truncated tails and plain-decoding steps are not counted. Always reported with: chain or
                tree, its three parameters, temperature, number of verify steps
accept_rate[i]  share of the verify steps that reached depth i and accepted it (conditional); the share of all verify
                steps is called unconditional
forecast        accept_length computed during training from held-out rollouts, without running the engine: over the
                same texts equal to the engine's (in bfloat16 but for rounding), over whole answers within 4 % of it
                where both were measured
rollout         an answer written by the target itself (on-policy), with its provenance: target, temperature, seed,
                draft used
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.infer.engine.config import EngineConfig
    from toolkit.infer.load.llm import LLM
    from toolkit.infer.request.params import SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_LAZY = {
    "EngineConfig": "toolkit.infer.engine.config",
    "LLM": "toolkit.infer.load.llm",
    "SamplingParams": "toolkit.infer.request.params",
}


def __getattr__(name: str) -> Any:
    """`from toolkit import LLM` loads torch; `import toolkit`, which every command does, must not."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
