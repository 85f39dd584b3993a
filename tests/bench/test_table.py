import io

import pytest
from rich.console import Console

from toolkit.bench.table import print_acceptance, prompts_phrase, verdict_line


def printed(record, width=118):
    out = io.StringIO()
    print_acceptance(record, Console(file=out, width=width))
    return out.getvalue()


def test_tables_hold_every_shape_and_every_task_of_the_best_one(record):
    """The terminal's numbers are the record's, rounded, with what they depend on above them."""
    text = " ".join(printed(record).split())
    assert "temperature 0, batch 1, verify steps 1623 / 1623" in text
    assert "chain 4 1.93 [1.84, 2.03] 62 56 50 44 39.4 27.3 1.44x yes (17 near-ties)" in text
    assert "tree 4x4/16 (best) 2.21 [2.12, 2.31]" in text
    assert "By task, tree 4x4/16" in text and "rewriting (5) 2.61 [2.52, 2.71]" in text


def test_without_a_terminal_the_text_is_plain(record, capsys):
    """Redirected to a file, the table must not be squeezed to 80 columns or hold colour codes."""
    print_acceptance(record)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "yes (17 near-ties)" in out and "…" not in out


def test_numbers_survive_a_narrow_terminal(record):
    assert "1.93 [1.84, 2.03]" in printed(record, width=80)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "54 of 88 speculative answers of 2 draft shapes equal plain decoding's; 34 first differ from it"),
        ({"near_ties": 0}, "All 88 speculative answers of 2 draft shapes equal plain decoding's"),
        ({"tokens_equal": False, "unequal": 3}, "NOT LOSSLESS"),
        ({"tokens_equal": None, "near_ties": None, "unequal": None}, "were not compared"),
    ],
)
def test_verdict_says_what_was_found(record, changes, text):
    """A run that was not lossless, or not checked, must never read like one that was."""
    for row in record["rows"]:
        row.update(changes)
    assert text in verdict_line(record)
    assert printed(record)


def test_missing_numbers_are_dashes(record):
    """A batch of mixed tasks has no speed by task, one prompt no interval."""
    for row in record["rows"]:
        row.update(tokens_per_s=None, plain_tokens_per_s=None, speedup=None, interval=[None, None])
    assert "chain 4 1.93 62 56 50 44 - - - yes" in " ".join(printed(record).split())


def test_prompts_of_a_file_are_named(record):
    record["settings"]["prompts"] = "mt_bench.jsonl"
    assert prompts_phrase(record) == "40 prompts of mt_bench.jsonl"
