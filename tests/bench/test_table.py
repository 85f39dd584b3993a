import io
import re

import pytest
from rich.console import Console

from toolkit.bench.acceptance import measured_summary
from toolkit.bench.table import outcome_line, print_acceptance
from toolkit.pipeline.measure import headline


def printed(record, width=118):
    out = io.StringIO()
    print_acceptance(record, Console(file=out, width=width))
    return out.getvalue()


def test_tables_hold_every_shape_and_every_task_of_the_best_one(record):
    """The terminal's numbers are the record's, rounded, with what they depend on above them."""
    text = " ".join(printed(record).split())
    assert "temperature 0, batch 1; verify steps: chain 4 1623, tree 4x4/16 1623" in text
    assert "plain decoding - - - 27.3" in text
    assert "chain 4 1.93 [1.84, 2.03] 100 % 62 56 50 44 39.4 1.44x 27 of 44" in text
    assert "tree 4x4/16 (best) 2.21 [2.12, 2.31]" in text
    assert "By task, tree 4x4/16" in text and "rewriting (5) 2.61 [2.52, 2.71]" in text


def test_a_table_by_context_where_there_are_two(record):
    """Text that fits one class has no such table; a setting without steps in a class has a dash there."""
    short = {"from": 0, "below": 512, "verify_steps": 40, "accept_length": 2.5, "interval": [2.4, 2.6]}
    for row in record["rows"]:
        row["by_context"] = [short]
    assert "by tokens before the step" not in printed(record)
    record["rows"][0]["by_context"] = [short, short | {"from": 4096, "below": 8192, "accept_length": 1.5}]
    text = " ".join(printed(record).split())
    assert "under 512 2.50 [2.40, 2.60] 2.50 [2.40, 2.60] 4096 to 8191 1.50 [2.40, 2.60] - " in text


def with_adaptive(record, adaptive, chain, tree):
    """The record with these speedups; adaptive drafting drafted in 30 % of its steps."""
    for row in list(record["rows"]):
        row.update(speedup=tree if row["shape"] == "tree" else chain)
        if row["shape"] == "tree":
            record["rows"].append(row | {"shape": "adaptive", "speedup": adaptive, "drafted_share": 0.3})
    record["rows"].sort(key=lambda row: row["shape"] != "adaptive")
    return record


@pytest.mark.parametrize(
    ("speedups", "says", "recommended"),
    [
        ((1.24, 1.01, 0.57), "27.3: 1.24x.", "adaptive"),
        ((0.97, 1.10, 0.57), "0.97x. Drafting a chain 4 in every step (--shape 4,1,5) is faster here: 1.10x.", "4,1,5"),
        ((1.004, 0.98, 0.57), "1.00x. No setting is faster than plain decoding here. What may help: n-gram", None),
    ],
)
def test_what_loses_to_plain_decoding_is_never_recommended(record, speedups, says, recommended):
    """A newcomer types what the last lines say; a slower server would be the first thing seen."""
    assert says in outcome_line(with_adaptive(record, *speedups))
    summary = measured_summary(record)
    assert summary["recommended"] == recommended
    assert (summary["best_shape"], summary["adaptive_shape"]) == ("4,1,5", "4,4,16")


def test_what_drafts_nothing_gains_nothing(record):
    """Adaptive drafting of a useless head soon decodes plainly, and was recommended where it happened to be faster."""
    for row in with_adaptive(record, 1.03, 0.97, 0.57)["rows"]:
        row |= {"drafted_share": 0.0} if row["shape"] == "adaptive" else {}
    assert "No setting is faster than plain decoding here." in outcome_line(record)
    assert measured_summary(record)["recommended"] is None


def test_what_lookup_adds_is_not_the_heads(record):
    """The head alone comes first, and lookup is named beside it. A head that gains nothing is not recommended."""
    alone, says = 0.98, "1.24x. The gain is lookup's, which needs no head (--draft ngram)."
    with_adaptive(record, 1.24, 0.97, 0.57)
    own = [row | {"lookup": False, "speedup": alone} for row in record["rows"] if row["shape"] == "adaptive"]
    record["rows"] = [*own, *(row | {"lookup": True} if row["shape"] == "adaptive" else row for row in record["rows"])]
    text = " ".join(printed(record).split())
    assert "The head alone writes 42.7 tokens/s where plain decoding writes 27.3: 0.98x" in text and says in text
    assert measured_summary(record)["recommended"] is None
    line = headline(record)
    assert re.match(r"the head alone: accept_length 2\.21 .*, 0\.98x plain decoding.*; with lookup 2", line)
