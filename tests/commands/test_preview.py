"""`toolkit preview` as it is typed."""

from __future__ import annotations

import json

import torch

from toolkit.cli import main
from toolkit.commands.preview import SUPERVISED, painted, token_kinds
from toolkit.data.batches import Example, supervised_mask


def test_a_terminal_gets_colours(tiny_target, tiny_target_directory, tmp_path, capsys, monkeypatch):
    """Dim what is read, yellow the first token, green what is predicted; NO_COLOR is heard."""
    ids = tiny_target.tokenizer("one two three four", add_special_tokens=False)["input_ids"]
    response = [False] * (len(ids) - 3) + [True] * 3
    texts = [tiny_target.tokenizer.decode(part) for part in (ids[:-3], ids[-3:-2], ids[-2:])]
    example = Example("a", ids, response)
    wanted = "".join(f"\x1b[{colour}m{text}\x1b[0m" for colour, text in zip((2, 33, 32), texts, strict=True))
    assert painted(example, token_kinds(response), tiny_target.tokenizer, coloured=True) == wanted
    row = {"id": "a", "split": "train", "input_ids": ids, "response_spans": [[len(ids) - 3, len(ids)]]}
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["preview", str(path), "--target", str(tiny_target_directory)]) == 0
    assert wanted in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["preview", str(path), "--target", str(tiny_target_directory)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and f"[{texts[2]}]" in shown and "1 train rollouts, 2 supervised" in shown
    assert main(["preview", str(path)]) == 2
    assert "--target" in capsys.readouterr().err


def test_kinds_are_the_loss_mask():
    """Drawn by another rule than the training's, a preview would reassure about the wrong tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        response = torch.rand(12, generator=generator) < 0.6
        mask = supervised_mask(response[None], 0)[0]
        predicted = (mask.nonzero().squeeze(-1) + 2).tolist()
        kinds = token_kinds(response.tolist())
        # Token 1 has no root before it: two real tokens precede every answer, or there is no prompt.
        assert [at for at, kind in enumerate(kinds) if kind == SUPERVISED and at > 1] == predicted
