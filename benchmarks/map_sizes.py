"""Sizes of a token map beside each other: acceptance, time of the head, speed.

    python benchmarks/map_sizes.py --draft runs/NAME/ckpt --counts runs/NAME/token_map [--shape 3,1,4]
    python benchmarks/map_sizes.py --random 262144

The maps are those of --counts, by `toolkit build-token-map`. Every size runs end to end; `auto` is the size that the
command's `--size auto` takes, `predicted` that of the best prediction. --random V: a head with random weights on a
random target of V ids, of which only the times mean something.
Writes benchmarks/results/map-sizes-<target>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import Sampling
from toolkit.bench.engine_context import Trial
from toolkit.bench.map_size import SizeResult, SizeTrials, best_size, predicted_size, sizes_of, with_figures
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import device_of, load_models
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.pipeline.map_size import size_table
from toolkit.targets.target import Target
from toolkit.threads import physical_cores, users_threads
from toolkit.tokenmap.build import build_token_map
from toolkit.tokenmap.counts import load_counts
from toolkit.tokenmap.token_map import TokenMap

LEAST = 2048


def random_models(vocab_size: int) -> tuple[Target, DraftCheckpoint]:
    """A target of the demo's width with V ids, and an MTP head; all weights are random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    words = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), eos_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    target = Target(model=model, tokenizer=tokenizer, name="random", revision=None, dtype=torch.bfloat16)
    head = MtpHead(MtpConfig.from_target_config(config, vocab_size=vocab_size)).to(torch.bfloat16)
    draft = DraftCheckpoint(head=head.eval().requires_grad_(False), token_map=TokenMap.identity(vocab_size))
    pack(target)
    return target, draft


def measure_all(trials: SizeTrials, sizes: Sequence[int], map_of: Callable[[int], TokenMap]) -> list[SizeResult]:
    """Every size, predicted and run end to end."""
    maps = [map_of(size) for size in sizes]
    results, _texts = trials.predicted(maps)
    drafts = {one.name: trials.fitted(token_map) for one, token_map in zip(results, maps, strict=True)}
    return with_figures(results, trials.run(drafts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft")
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--random", type=int, metavar="V")
    parser.add_argument("--shape", default="3,1,4")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(int(users_threads() or physical_cores()))
    config = EngineConfig(draft=args.draft or "random", max_running_requests=1)
    if args.random:
        target, draft = random_models(args.random)
        sizes = sizes_of(args.random, LEAST)
        map_of = lambda size: TokenMap.from_ids(range(size), args.random)  # noqa: E731
        open_draft = lambda: draft  # noqa: E731
        name = f"random-{args.random}"
    else:
        target, _ = load_models(config, device_of(config))
        counts = load_counts(args.counts)
        total, forced = counts.total(), counts.forced_ids
        sizes = [size for size in sizes_of(counts.vocab_size, len(forced)) if size >= LEAST]
        map_of = lambda size: build_token_map(total, size=size, forced_ids=forced)  # noqa: E731
        open_draft = lambda: load_draft(args.draft)  # noqa: E731
        draft, name = load_draft(args.draft), Path(target.name).name
    corpus = None if args.random else args.counts.name
    prompts, sampling = limited(builtin_prompts(), args.limit), Sampling(args.max_tokens, 0.0, 0)
    trial = Trial(target, draft, prompts, sampling, config).with_room()
    trials = SizeTrials(trial, open_draft, DraftShape.parse(args.shape))
    results = measure_all(trials, sizes, map_of)
    auto, predicted = best_size(results), predicted_size(results)
    best = max(results, key=lambda one: one.speedup or 0)
    marks: dict[str, str] = {}
    for mark, one in (("auto", auto), ("predicted", predicted), ("best", best)):
        marks[one.name] = f"{marks[one.name]}, {mark}" if one.name in marks else mark
    print("\n".join(size_table(results, marks)))
    rows: list[dict[str, Any]] = [{"corpus": corpus, **asdict(one)} for one in results]
    if args.random:
        for row in rows:
            row["coverage"] = None
    print(f"auto is {100 * (auto.speedup or 0) / (best.speedup or 1):.1f} % of the best")
    record = make_record(
        "token_map", command_line(), {**vars(args), "counts": None, "out": None}, rows,
        auto=auto.name, predicted=predicted.name, best=best.name,
        target=describe_target(target), draft=describe_draft(draft),
    )  # fmt: skip
    leave(record, f"map-sizes-{name}-{draft.kind}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
