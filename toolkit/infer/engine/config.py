"""The options of an engine. Each has one name, on the command line (`--tensor-parallel-size`), in Python and inside.

The command line reads this file without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    from toolkit.infer.drafters.choose_drafter import Draft
    from toolkit.infer.request.draft_tree import DraftShape
    from toolkit.targets.target import Target

T = TypeVar("T")
MOST_RECORDED = 64  # default limit of `cuda_graph_max_bs`: the host is a small part of larger rounds
MOST_COMPILED = 32  # default limit of `torch_compile_max_bs`
NGRAM, NATIVE, NONE = "ngram", "native", "none"  # values of `draft` that are no head of their own
LEAST = {
    "max_running_requests": 1,
    "draft_confidence": 0,
    "context_length": 2,  # a prompt token and an answer token
    "chunked_prefill_size": 1,
    "tensor_parallel_size": 1,
    "max_total_tokens": 16,  # a page
    "cuda_graph_max_bs": 1,
    "torch_compile_max_bs": 1,
}


class ConfigError(ValueError):
    """Options of an engine that are unknown, out of range or incompatible with each other.

    Messages name options as fields in backticks (`draft`); commands print them as flags (--draft).
    """


def option(default: T, text: str, *, metavar: str | None = None, alias: str | None = None) -> T:
    """A field of EngineConfig with its help text. The text names other fields in backticks."""
    field: Any = dataclasses.field(default=default, metadata={"help": text, "metavar": metavar, "alias": alias})
    return field


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine. Each field has a help text; `toolkit serve --help` lists all fields.

    `check` refuses incompatible options. The engine checks what depends on the models.
    """

    target: str | None = option(
        None,
        "target model: smollm2-135m, a hub id, a directory or a .gguf file (default: the one that `draft` names); "
        "without `draft`, its own MTP module drafts, if it has one",
        metavar="MODEL",
    )
    draft: str | Path | None = option(
        None,
        "draft directory (runs/NAME/ckpt), or another project's EAGLE head: a directory, a .gguf file or a hub id "
        "(org/name, org/name@revision). One that names its target needs no `target`. ngram needs no head: it drafts "
        "what followed the same words earlier in the request. native is the MTP module in the target's own checkpoint "
        "(give `target` for both). none decodes plainly (default: native if the target has such a module, else none)",
        metavar="DIR",
    )
    revision: str | None = option(None, "revision of a `target` on a hub (default: main)", metavar="NAME")
    chat_template: str | None = option(
        None,
        "chat template in place of the target's own: a file of a Jinja template, chatml, or none: plain text for a "
        "base model (default: the one that the draft was trained with, else the target's)",
        metavar="FILE",
    )
    shape: str | None = option(
        None,
        "draft shape of a step: levels, branches, verified nodes with the root; 4,1,5 is a chain of 4 drafted tokens, "
        "5,4,16 a tree; 64 a tree of 64 nodes whose depth follows from the head; mtp-3 and mtp-4 are SGLang's for MTP "
        "modules (default: the best one measured, else a chain)",
        metavar="S,K,N",
    )
    adaptive: bool | None = option(
        None,
        "in every step choose the shape, a smaller one or nothing, by measured costs and running acceptance (default: "
        "yes, unless `shape` is given, and not on a GPU: then every step drafts the shape)",
    )
    lookup: bool | None = option(
        None,
        "beside the head draft what followed the same words earlier in the request, where that is expected to be "
        "faster; the answers stay the same (default: with adaptive drafting)",
    )
    lookup_corpus: str | Path | None = option(
        None, "`lookup` in the earlier answers of FILE too: jsonl (messages or text) or plain text", metavar="FILE"
    )
    token_map: str | Path | None = option(
        None,
        "freq_N.pt, as `toolkit build-token-map` writes it: only these ids are drafted. For heads "
        "that score tokens by the target's output matrix (eagle2, mtp, some dspark). Ids of special tokens and ends of "
        "turns are added",
        metavar="FILE",
    )
    draft_confidence: float = option(
        0.0, "a dspark head ends a chain at a chance below P; 0: never (default)", metavar="P"
    )
    verify: Literal["auto", "target", "rejection", "block"] = option(
        "auto",
        "how drafts are accepted at a temperature above 0; with each the answers follow the target's distribution. "
        "target: a seed gives the tokens that it gives without drafts (in bfloat16 up to near-ties). rejection and "
        "block: drafts are drawn from the head's distribution (chains only), and the tokens of a seed depend on the "
        "drafts. auto (the default): block, which keeps most drafts, for chains of a head and requests that state no "
        "seed; target for the rest, and where rounds run as CUDA graphs",
    )
    no_draft: bool = option(False, "decode plainly with the target that `draft` names")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "number format; float32 makes comparisons with plain decoding exact, float16 needs a GPU (default: auto, the "
        "target's; a float16 checkpoint runs in bfloat16 on a GPU and in float32 on a CPU)",
    )
    quantization: Literal["auto", "none", "int8"] = option(
        "auto",
        "one byte per weight in the target's linear layers (CPU); the answers are those of the quantised target, "
        "drafted or not (default: auto, none unless the draft was trained for such a target)",
    )
    draft_quantization: Literal["auto", "none", "int8", "fp8"] = option(
        "auto",
        "one byte per weight in the draft head's linear layers, int8 on a CPU, fp8 on a GPU: shorter draft steps, some "
        "other drafts, the same answers (default: auto, fp8 on a GPU of compute capability 8.9 or later, int8 beside a "
        "quantised target and for bfloat16 heads on a CPU)",
    )
    deterministic: bool = option(
        False,
        "give an answer and its log-probabilities the same bits, whatever batch, prefix cache, parts of the prompt and "
        "drafts it is computed with (on a GPU only small models were tested); `verify` is target (default: off)",
    )
    torch_compile: bool = option(
        False,
        "on a GPU: compile target and head by torch.compile before rounds are recorded as CUDA graphs, for targets "
        "whose layers have no fused form",
    )
    torch_compile_max_bs: int | None = option(
        None,
        "with `torch_compile`: compile rounds of up to N requests (default: 32, at most those recorded)",
        metavar="N",
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "run rounds of up to N requests as CUDA graphs (default: on a GPU "
        f"`max_running_requests`, at most {MOST_RECORDED})",
        metavar="N",
    )
    disable_cuda_graph: bool = option(False, "run all rounds eagerly, on a GPU too (default: off)")
    disable_overlap_schedule: bool = option(
        False,
        "with CUDA graphs: launch each round only when the results of the round before it have been read. Else it is "
        "launched earlier, so that the GPU does not wait for the host (default: off)",
    )
    device: str = option("auto", "cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    tensor_parallel_size: int = option(
        1,
        "divide target, head and cache among N local processes, each on its own GPU or all on the CPU (default: 1)",
        metavar="N",
        alias="--tp",
    )
    max_running_requests: int = option(16, "requests decoded at once; more wait (default: 16)", metavar="N")
    context_length: int | None = option(
        None, "tokens of prompt and answer, at most the target's context (default: that, or what fits)", metavar="N"
    )
    max_total_tokens: int | None = option(
        None,
        "tokens that all requests and kept prefixes hold together; when they do not suffice, the youngest requests "
        "wait (default: as many as fit into an eighth of the machine's memory, or into 0.8 of what a GPU has free)",
        metavar="N",
    )
    mem_fraction_static: float | None = option(
        None,
        "in place of `max_total_tokens`: the cache's share of the memory (default: 0.125, of a GPU's free one 0.8)",
        metavar="F",
    )
    chunked_prefill_size: int = option(
        2048,
        "read prompts in parts of at most N tokens (default: 2048); a server on a CPU in one process reads "
        "fewer while others decode",
        metavar="N",
    )
    prefix_cache: bool = option(
        True, "keep what was read: what a later prompt shares with its beginning is not read again"
    )

    @property
    def drafts(self) -> bool:
        """Whether decoding may be speculative. Without `draft` it is if the target has an MTP module of its own."""
        return str(self.draft) != NONE and not self.no_draft

    @property
    def target_options(self) -> dict[str, Any]:
        """What loads the target, beside its name and its dtype. quantization: None: the weights' own format."""
        quantization = None if self.quantization == "none" else self.quantization
        return {"revision": self.revision, "quantization": quantization, "chat_template": self.chat_template}

    @property
    def of_drafts(self) -> list[str]:
        """The options that are given and mean nothing without drafts."""
        names = ("shape", "adaptive", "lookup", "lookup_corpus", "token_map", "draft_confidence")
        given = [name for name in names if getattr(self, name)]
        return [*given, *(["draft_quantization"] if self.draft_quantization in ("int8", "fp8") else [])]

    @property
    def asks_for_lookup(self) -> bool:
        """Whether an option asks for lookup; else it is a part of adaptive drafting."""
        return bool(self.lookup) or self.lookup_corpus is not None

    def why_eager(
        self, device_type: str, target: Target | None = None, draft: Draft | None = None, head_width: int = 0
    ) -> str | None:
        """Why no round runs as a CUDA graph; None: rounds do. All reasons are here: of the options, and of the models
        if they are given. Beside graphs parts of rounds run eagerly for their requests' sake (`GraphRounds`).

        draft: None: the one that the option names. head_width: of the widest attention head.
        """
        if device_type != "cuda":
            return f"the device is {device_type}"
        if self.disable_cuda_graph:
            return "`disable_cuda_graph` is set"
        if target is not None:
            from toolkit.infer.attention.linear_layers import linear_layers
            from toolkit.infer.kernels.dispatch import ops_for

            if linear_layers(target.config):
                return "the target has linear-attention layers"
            if target.device.type == "cuda" and head_width > (most := ops_for("cuda").paged_width):
                return f"heads are {head_width} wide, and paged attention supports at most {most}"
        return None

    def with_graph_sizes(self) -> Self:
        """A copy that states `cuda_graph_max_bs`, and `torch_compile_max_bs` if rounds are compiled."""
        rows, compiled = self.cuda_graph_max_bs, self.torch_compile_max_bs
        rows = min(self.max_running_requests, MOST_RECORDED) if rows is None else rows
        compiled = min(rows, MOST_COMPILED) if compiled is None and self.torch_compile else compiled
        return dataclasses.replace(self, cuda_graph_max_bs=rows, torch_compile_max_bs=compiled)

    def with_options(self, **options: Any) -> Self:
        """A copy with other options. Raises ConfigError for an unknown name."""
        for name in sorted(options.keys() - value_types().keys()):
            near = next(iter(difflib.get_close_matches(name, value_types(), n=1)), None)
            hint = f"did you mean `{near}`?" if near else f"the options are {', '.join(value_types())}"
            raise ConfigError(f"`{name}` is not an option of the engine; {hint}")
        return dataclasses.replace(self, **options)

    def draft_shape(self) -> DraftShape | None:
        """The option `shape`, parsed. Raises ConfigError."""
        return None if self.shape is None else parse_shape(self.shape, "`shape`")

    def check(self, device_type: str) -> None:
        """Check the options against each other and against the device ("cpu", "cuda"), without the models.

        Raises ConfigError; EngineError or DraftShapeError for a verifier that does not support the draft or the shape.
        """
        self._check_models()
        self.check_engine(device_type)
        from toolkit.infer.verify.verifiers import choose_verifier

        head, recorded = self.drafts and str(self.draft) != NGRAM, self.why_eager(device_type) is None
        choose_verifier(self.verify, self.draft_shape(), head=head, recorded=recorded)

    def check_engine(self, device_type: str) -> None:
        """Check the options that do not choose a model. Raises ConfigError."""
        for name, hint in value_types().items():
            value, choices = getattr(self, name), choices_of(hint)
            if choices and value not in choices:
                raise ConfigError(f"`{name}` is {value!r}; one of {', '.join(choices)} is needed")
            if name in LEAST and value is not None and value < LEAST[name]:
                raise ConfigError(f"`{name}` is {value}; at least {LEAST[name]} is needed")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError(
                f"`mem_fraction_static` is {self.mem_fraction_static:g}; a share between 0 and 1 is needed, such as 0.8"
            )
        for name, why in self._conflicts(device_type):
            raise ConfigError(f"`{name}` is {getattr(self, name)}, but {why}; leave one of them out")

    def check_plain(self) -> None:
        """Raise ConfigError if an option asks for drafts: nothing is drafted."""
        for name in self.of_drafts:
            raise ConfigError(
                f"`{name}` is {getattr(self, name)}, but nothing is drafted; give `draft`, or leave `{name}` out"
            )

    def _conflicts(self, device_type: str) -> Iterator[tuple[str, str]]:
        """Options that other options or the device rule out, each with the reason."""
        eager, sizes = self.why_eager(device_type), self.with_graph_sizes()
        recorded, compiled = sizes.cuda_graph_max_bs or 0, sizes.torch_compile_max_bs or 0
        parallel, device = f"`tensor_parallel_size` is {self.tensor_parallel_size}", f"`device` is {device_type}"
        quantized = {"int8": "cpu", "fp8": "cuda"}.get(self.draft_quantization, device_type)
        same_bits = "`deterministic` is set, and the bits of an answer would depend on what is computed beside it"
        for name, is_set, why in (
            ("mem_fraction_static", None not in (self.mem_fraction_static, self.max_total_tokens),
             "`max_total_tokens` is given, which sizes the cache too"),
            ("lookup_corpus", self.lookup_corpus is not None and self.lookup is False, "`lookup` is off"),
            ("draft_quantization", quantized != device_type, f"{device}, and that needs {quantized}"),
            ("quantization", self.tensor_parallel_size > 1 and self.quantization == "int8", parallel),
            ("draft_quantization", self.tensor_parallel_size > 1 and self.draft_quantization in ("int8", "fp8"),
             parallel),
            ("torch_compile", self.tensor_parallel_size > 1 and self.torch_compile, parallel),
            ("torch_compile", self.deterministic and self.torch_compile, same_bits),
            ("tensor_parallel_size", self.deterministic and self.tensor_parallel_size > 1, same_bits),
            ("verify", self.deterministic and self.verify in ("rejection", "block"), f"{same_bits}: it needs target"),
            ("deterministic", self.deterministic and device_type not in ("cpu", "cuda"), f"{device}: cpu or cuda"),
            ("torch_compile_max_bs", compiled > 0 and not self.torch_compile, "`torch_compile` is not set"),
            ("cuda_graph_max_bs", self.cuda_graph_max_bs is not None and eager,
             f"no round can be a CUDA graph: {eager}"),
            ("disable_overlap_schedule", self.disable_overlap_schedule and eager, f"only CUDA graphs overlap: {eager}"),
            ("torch_compile", self.torch_compile and eager, f"only CUDA graphs are compiled: {eager}"),
            ("torch_compile_max_bs", compiled > recorded,
             f"rounds of at most {recorded} requests run as CUDA graphs (`cuda_graph_max_bs`)"),
        ):  # fmt: skip
            if is_set:
                yield name, why

    def _check_models(self) -> None:
        """Check the options that choose target and draft. Raises ConfigError."""
        if self.target is None and (self.draft is None or str(self.draft) == NONE):
            raise ConfigError("neither `draft` nor `target` is given; give a draft directory (`draft`) or a target")
        if self.target is None and self.revision is not None:
            raise ConfigError(
                f"`revision` is {self.revision!r}, but `target` is not given; give both, or neither to use those that "
                "the draft directory states"
            )
        if self.target is None and str(self.draft) in (NGRAM, NATIVE):
            raise ConfigError(f"`draft` is {self.draft}, which does not name a target; give one with `target`")
        if not self.drafts:
            self.check_plain()
        if str(self.draft) == NGRAM and self.draft_quantization in ("int8", "fp8"):
            raise ConfigError(
                f"`draft_quantization` is {self.draft_quantization}, but there is no draft head; give `draft`, or "
                "leave it out"
            )


@cache
def value_types() -> dict[str, Any]:
    """The type of each option's value, by name."""
    return typing.get_type_hints(EngineConfig)


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values of a Literal; empty for another type."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def parse_shape(text: str, where: str) -> DraftShape:
    """Parse a shape. Raises ConfigError that begins with `where`, the source of the text."""
    from toolkit.infer.request.draft_tree import DraftShape
    from toolkit.infer.request.params import DraftShapeError

    try:
        return DraftShape.parse(text)
    except DraftShapeError as error:
        raise ConfigError(f"{where}: {error}") from error
