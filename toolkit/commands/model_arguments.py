"""The arguments that `serve` and `chat` share: which engine to open."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the parser is built without torch
    from toolkit.infer.load.load_engine import Opened


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--draft, --target, --shape, --adaptive, --token-map, --verify, --no-draft, --dtype, --quantization,
    --draft-quantization, --torch-compile, --torch-compile-max-bs, --cuda-graph-max-bs, --disable-overlap-schedule,
    --tensor-parallel-size, --device."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--draft",
        metavar="DIR",
        help="draft directory (runs/NAME/ckpt), or another project's EAGLE head, by directory or hub id (org/name, "
        "org/name@revision); one that names its target is enough alone. Or ngram, without a head: "
        "what followed the same words earlier in the request is drafted (give --target)",
    )
    group.add_argument(
        "--target",
        metavar="MODEL",
        help="smollm2-135m, a hub id, a directory or a .gguf file; without --draft: plain decoding",
    )
    group.add_argument(
        "--shape",
        metavar="S,K,N",
        help="what is drafted per step: levels, branches, nodes verified with the root; "
        "4,1,5 is a chain of 4, 5,4,16 a tree (default: the best one measured with the head, else 4,1,5)",
    )
    group.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        help="draft the shape, less or nothing, whatever is fastest at the moment (default: yes, unless --shape is "
        "given: then exactly that is drafted)",
    )
    group.add_argument(
        "--token-map",
        metavar="FILE",
        help="freq_N.pt: draft only these ids, with their rows of the target's output matrix (eagle2 and mtp heads, "
        "which share it); missing special and end-of-turn ids are added",
    )
    group.add_argument(
        "--verify",
        default="auto",
        choices=("auto", "target", "rejection", "block"),
        help="how drafts are accepted at a temperature above 0, the answers' law being the target's with each. follow: "
        "one seed writes what it writes without drafts. rejection and block: drafts are drawn from the head's law "
        "(chains only); a seed's tokens then depend on the drafts. auto (the default): block, which keeps most "
        "drafts, for a head's chains and requests that state no seed; follow for the rest, and with "
        "--cuda-graph-max-bs",
    )
    group.add_argument("--no-draft", action="store_true", help="decode plainly with the target that --draft names")
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: auto, as the target"
    )
    add_quantization_argument(group)
    add_compile_argument(group)
    add_device_arguments(group)


def add_quantization_argument(group: argparse._ActionsContainer) -> None:
    """--quantization and --draft-quantization; `bench` takes them too."""
    group.add_argument(
        "--quantization",
        choices=("auto", "none", "int8", "int4"),
        help="a byte, or half of one, a weight in the target's linear layers (CPU); the answers are then those of the "
        "quantised target, drafted or not (default: auto, none unless the draft was trained for such a target)",
    )
    group.add_argument(
        "--draft-quantization",
        choices=("auto", "none", "int8"),
        help="a byte a weight in the draft head's linear layers (CPU): shorter draft steps, other drafts now and then, "
        "the same answers (default: auto, int8 beside a quantised target, and for bfloat16 heads on a CPU)",
    )


def add_compile_argument(group: argparse._ActionsContainer) -> None:
    """--torch-compile; `bench` takes it too."""
    group.add_argument(
        "--torch-compile",
        action="store_true",
        default=None,
        help="run target and head compiled, for shorter steps; on a CPU the first start compiles them, "
        "which takes a minute or two and a C++ compiler, and later ones find them in TOOLKIT_CACHE; on a GPU (serve, "
        "chat) the rounds of --cuda-graph-max-bs are compiled before they are recorded",
    )


def add_device_arguments(group: argparse._ActionsContainer) -> None:
    """--device, --tensor-parallel-size, and what a GPU does with rounds."""
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    group.add_argument(
        "--torch-compile-max-bs",
        type=int,
        metavar="N",
        help="with --torch-compile on a GPU: rounds of up to N requests run compiled layers, the head's too (default: "
        "32, or --cuda-graph-max-bs if that is less)",
    )
    group.add_argument(
        "--cuda-graph-max-bs",
        type=int,
        metavar="N",
        help="run rounds of up to N requests as one CUDA graph each (GPU); the draft shape is then the same in every "
        "round (default: no graphs)",
    )
    group.add_argument(
        "--disable-overlap-schedule",
        action="store_true",
        help="with --cuda-graph-max-bs: launch a round only when the results of the one before it are read (default: "
        "before that, so that the GPU does not wait for the host)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="divide target, head and cache among N processes of this machine, each on a GPU of its own, or on the CPU "
        "(default: 1)",
    )


def open_from(args: argparse.Namespace, max_batch: int, **options: Any) -> Opened:
    """Opens the engine that the arguments name; options: further ones of open_engine.

    Raises ValueError with a message for the user."""
    from toolkit.infer.load.open_parallel import open_parallel

    return open_parallel(
        args.tensor_parallel_size,
        draft=args.draft,
        target=args.target,
        shape=args.shape,
        adaptive=args.adaptive,
        token_map=args.token_map,
        verify=args.verify,
        use_draft=not args.no_draft,
        dtype=args.dtype,
        quantization=args.quantization or "auto",
        draft_quantization=args.draft_quantization or "auto",
        torch_compile=bool(args.torch_compile),
        torch_compile_max_bs=args.torch_compile_max_bs,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
        overlap_schedule=not args.disable_overlap_schedule,
        device=args.device,
        max_batch=max_batch,
        **options,
    )


def short_name(target_name: str) -> str:
    """How a target is called in the API: hub ids and the demo by their name, a path by its last part."""
    path = Path(target_name).expanduser()
    if not path.exists():
        return target_name
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def describe(opened: Opened) -> str:
    """What drafts, in a line: the draft head or n-gram lookup with shape and verifier, or that there is none."""
    if opened.shape is None or opened.draft is None:
        return "none, plain decoding"
    path = getattr(opened.draft, "path", None)
    what = opened.draft.kind if path is None else f"{path} ({opened.draft.kind})"
    return f"{what}, {opened.shape_name}, verify {opened.engine.verifier.name}"
