"""Two records side by side: what is refused and why, and the intervals of the differences."""

import copy
import io

import pytest
from rich.console import Console

from toolkit.bench.acceptance import ONE_BY_ONE, measure_acceptance
from toolkit.bench.compare import compare_records
from toolkit.bench.prompts import Prompt
from toolkit.bench.records import RecordError, write_record
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance

PROMPTS = [Prompt(str(n), "math", (f"count {n} apples", "and rivers")[: 1 + n % 2]) for n in range(6)]


@pytest.fixture(scope="module")
def record(tiny_target, tiny_draft):
    shapes = [DraftShape.chain(2), DraftShape(3, 2, 6)]
    forced = ForcedAcceptance.parse("2.4")
    trial = Trial(tiny_target, tiny_draft, PROMPTS, Sampling(24, 0.0, 0), ONE_BY_ONE)
    return measure_acceptance(trial, shapes, warmup=0, forced=forced)


def changed(record, **places):
    """A copy with other values; `settings__seed=1` is record["settings"]["seed"]."""
    copied = copy.deepcopy(record)
    for place, value in places.items():
        *above, last = place.split("__")
        at = copied
        for name in above:
            at = at[name]
        at[last] = value
    return copied


def compared(tmp_path, a, b, width=118):
    for name, record in (("a.json", a), ("b.json", b)):
        write_record(tmp_path / name, record)
    out = io.StringIO()
    compare_records(tmp_path / "a.json", tmp_path / "b.json", Console(file=out, width=width))
    return out.getvalue()


def row_of(text, name):
    """The rows of both tables that begin with this name, as words."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(name)]


def with_accepted(record, more):
    """As if each counted step of chain 2 had accepted `more` drafts more."""
    copied = copy.deepcopy(record)
    for entry in copied["answers"]:
        if entry["shape"] == "chain 2":
            entry["accepted"] += more * entry["verify_steps"]
    copied["rows"][0]["accept_length"] += more
    return copied


def twice_as_fast(record, plain_too=False):
    copied = copy.deepcopy(record)
    for entry in copied["times"]:
        if entry["shape"] == "chain 2" or plain_too:
            entry["decode_s"] /= 2
    if not plain_too:
        copied["rows"][0]["speedup"] *= 2
    return copied


def test_differences_and_their_intervals(tmp_path, record):
    """Paired: every prompt gained 0.5 a step, so the interval of the difference has no width, though the prompts differ
    among themselves; in the same way the speed of every group doubled."""
    text = compared(tmp_path, record, twice_as_fast(with_accepted(record, 0.5)))
    lengths, speeds = row_of(text, "chain 2 (forced)")
    assert lengths.endswith("+0.50 [+0.50, +0.50]") and speeds.endswith("2.00x [2.00, 2.00]")
    lengths, speeds = row_of(text, "tree 3x2/6 (forced)")
    assert lengths.endswith("+0.00 [+0.00, +0.00]") and speeds.endswith("1.00x [1.00, 1.00]")
    assert "6 prompts" in text or "6 built-in prompts" in text
    assert text.splitlines()[0].endswith("temperature 0, forced accept_length 2.40")


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"settings__prompts_sha256": "0", "settings__prompts": "mt.jsonl"}, "and 6 prompts of mt.jsonl, not the"),
        ({"target__name": "llama"}, "target name tiny and llama"),
        ({"settings__max_tokens": 96, "settings__seed": 3}, "max_tokens 24 and 96; seed 0 and 3: measure both"),
        ({"rows": []}, "no draft shape in common: Only A has chain 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_with_the_reason(tmp_path, record, places, says):
    with pytest.raises(RecordError, match=says):
        compared(tmp_path, record, changed(record, **places))


def test_other_machines_compare_acceptance_alone(tmp_path, record):
    text = compared(tmp_path, record, changed(record, hardware__cpu="Z80"))
    assert (
        "Speeds are not compared, since they differ in cpu" in " ".join(text.split())
        and "tokens/s" not in text
        and "B / A" not in text
    )
    (lengths,) = row_of(text, "chain 2 (forced)")
    assert lengths.endswith("+0.00 [+0.00, +0.00]")
