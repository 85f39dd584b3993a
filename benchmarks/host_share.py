"""How much of a round the host takes: Python and what it calls besides the operators that compute, draft and verify
included.

    OMP_NUM_THREADS=1 python benchmarks/host_share.py --draft runs/smollm2-135m/ckpt

One request, one thread, rounds of a long answer. PyTorch's profiler tells when operators run (`aten::..`, and what it
does not see by itself: our functions of C++); the host is what is left of the round:

    round   |--python--|aten::linear|--python--|toolkit::attend            |--python--|
    inside                                     |-python-|aten::bmm|-python-|           operators of ours are Python too
    host    |~~~~~~~~~~|            |~~~~~~~~~~|~~~~~~~~|         |~~~~~~~~|~~~~~~~~~~|

An operator's own dispatch and checks count as operator. The profiler takes its time with every range it notes, half of
it in the range and half before and behind: rounds are timed without it too, and what it added is taken off.
Times are the thread's own, so that processes beside it add little; a quiet machine is still the place to measure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit import LLM, SamplingParams, __version__
from toolkit.bench.prompts import builtin_prompts
from toolkit.bench.records import command_line, make_record
from toolkit.checkpoint.draft_dir import load_draft
from toolkit.infer.engine import round as engine_round
from toolkit.infer.engine.cpu_door import native_functions
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import stated_target

PARTS = ("draft", "verify", "commit")
ROUND, OURS, CPP = "round", "toolkit::", "function of C++"
NOT_MEASURED = ("tokens", "seconds", "tokens_per_s", "accept_length", "peak_memory_bytes")
WARM_UP = 8


@dataclass
class Share:
    """Of rounds, or of a part of them: seconds under the profiler and those in operators; and what the profiler added
    to either, in events: half of its time with one lies within the event's range, half around it."""

    seconds: float = 0.0
    operators: float = 0.0
    events: float = 0.0
    in_operators: float = 0.0
    outer: int = 0  # operators that Python called

    def host(self, an_event: float) -> float:
        """Seconds outside of operators; `an_event`: what the profiler adds for each."""
        return self.seconds - an_event * self.events - (self.operators - an_event * self.in_operators)


def is_python(name: str) -> bool:
    return name in PARTS or name == ROUND or name.startswith(OURS)


def share_of(events: Sequence[Any], running: float) -> Share:
    """events: those whose own time is Python's; operators inside may call Python again. running: the share of the time
    in which this thread had a core."""
    found = Share()
    for event in events:
        found.seconds += event.time_range.elapsed_us() / 1e6
        found.events += 0.5
        for child in event.cpu_children:
            _add(found, child)
    found.seconds, found.operators = running * found.seconds, running * found.operators
    return found


def _add(found: Share, event: Any) -> None:
    """What Python calls."""
    found.events += 1
    if not is_python(event.name):
        found.operators += event.time_range.elapsed_us() / 1e6
        found.outer += 1
        found.in_operators += 0.5
        _add_inside(found, event)
        return
    for child in event.cpu_children:
        _add(found, child)


def _add_inside(found: Share, event: Any) -> None:
    """What an operator calls is its own, but for operators of ours, which come back to Python."""
    for child in event.cpu_children:
        if is_python(child.name):
            found.operators -= child.time_range.elapsed_us() / 1e6
            found.in_operators += 0.5
            _add(found, child)
        else:
            found.events += 1
            found.in_operators += 1
            _add_inside(found, child)


@contextmanager
def named_parts(engine: Engine) -> Iterator[None]:
    """The engine's verbs, and our functions of C++ say when they run."""
    owners = [
        (engine.drafter, "propose", "draft"),
        (engine_round, "forward_tree", "verify"),
        (engine_round, "choose_tokens", "verify"),
        (engine, "_commit", "commit"),
        *((library, name, CPP) for library, name in native_functions()),
    ]
    owns = [getattr(owner, name) for owner, name, _ in owners]
    for (owner, name, part), own in zip(owners, owns, strict=True):
        setattr(owner, name, _named(own, part))
    try:
        yield
    finally:
        for (owner, name, _), own in zip(owners, owns, strict=True):
            setattr(owner, name, own)


def _named(own: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(own)
    def run(*args: Any, **keywords: Any) -> Any:
        with record_function(name):
            return own(*args, **keywords)

    return run


def seconds_of(step: Callable[[], Any], rounds: int) -> float:
    """Of one round: the thread's own time, which no other process adds to."""
    began = time.thread_time()
    for _ in range(rounds):
        step()
    return (time.thread_time() - began) / rounds


def measure(llm: LLM, rounds: int) -> dict[str, Any]:
    """Shares of rounds and of their parts: as many as are profiled are timed alone, before and behind."""
    engine = llm.engine
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": builtin_prompts()[0].turns[0]}], add_generation_prompt=True, tokenize=False
    )
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    steps = WARM_UP + 1 + 3 * rounds
    deepest = 0 if engine.shape is None else engine.shape.num_steps
    request = engine.add_request(ids, SamplingParams(max_tokens=2 + steps * (1 + deepest), ignore_eos=True))
    seconds_of(engine.step, WARM_UP)
    before = seconds_of(engine.step, rounds)
    with named_parts(engine), profile(activities=[ProfilerActivity.CPU]) as seen:
        engine.step()  # the profiler's own first steps
        began, own = time.perf_counter(), time.thread_time()
        for _ in range(rounds):
            with record_function(ROUND):
                engine.step()
        running = (time.thread_time() - own) / (time.perf_counter() - began)
    alone = (before + seconds_of(engine.step, rounds)) / 2
    if not engine.has_work():
        raise SystemExit(f"--rounds {rounds}: the target's context ended before {steps} rounds did; ask for fewer")
    engine.abort(request)
    tops = [event for event in seen.events() if event.name == ROUND]
    whole = share_of(tops, running)
    an_event = max(0.0, (whole.seconds - alone * rounds) / whole.events)
    parts = {part: [c for top in tops for c in top.cpu_children if c.name == part] for part in PARTS}
    by_part = {part: share_of(events, running).host(an_event) / rounds for part, events in parts.items()}
    host = whole.host(an_event) / rounds
    return {
        **dict.fromkeys(NOT_MEASURED),
        "context": request.length,
        "parts": {},
        "round_seconds": alone,
        "profiled_round_seconds": whole.seconds / rounds,
        "profiler_seconds_per_event": an_event,
        "events": whole.events / rounds,
        "operators_called": whole.outer / rounds,
        "host_seconds": host,
        "host_share": host / (whole.seconds / rounds - an_event * whole.events / rounds),
        "host_share_uncorrected": 1 - whole.operators / whole.seconds,
        "host_seconds_by_part": {**by_part, "rest": host - sum(by_part.values())},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, metavar="DIR", help="a trained head")
    parser.add_argument("--target", metavar="MODEL", help="another target than the one the draft directory names")
    parser.add_argument("--shapes", nargs="+", default=["3,1,4"], metavar="S,K,N", help="default: a chain of 3")
    parser.add_argument("--rounds", type=int, default=40, help="rounds profiled, and as many timed alone (default: 40)")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: nothing is written")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for shape in (None, *args.shapes):
        draft = None if shape is None else args.draft
        options = {"quantization": args.quantization, "device": "cpu", "shape": shape, "max_running_requests": 1}
        with LLM(args.target or stated_target(load_draft(Path(args.draft)))[0], draft, **options) as llm:
            row = {"engine": "ours", "version": __version__, "shape": shape}
            rows.append({**row, "weight_bits": llm.target.weight_bits, "batch": 1, **measure(llm, args.rounds)})
        found = rows[-1]
        parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in found["host_seconds_by_part"].items())
        print(
            f"{shape or 'plain'}: a round {1e3 * found['round_seconds']:.1f} ms, host {100 * found['host_share']:.1f} "
            f"% ({100 * found['host_share_uncorrected']:.1f} % under the profiler), {found['operators_called']:.0f} "
            f"operators called; host ms by part: {parts}"
        )
    settings = {"rounds": args.rounds, "threads": 1, "quantization": args.quantization}
    if args.out is not None:
        leave(make_record("engine", f"python benchmarks/{command_line()}", settings, rows), "host-share", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
