import torch

from toolkit.tokenmap.counts import Counts, Part, load_counts, save_counts

VOCAB = 6


def part(spec: str, weight: int, held_out: bool, task: str, ids: list[int]) -> Part:
    return Part(spec, weight, held_out, task, torch.bincount(torch.tensor(ids), minlength=VOCAB))


COUNTS = Counts(
    (
        part("a", 3, False, "", [0, 1]),
        part("a", 3, False, "math", [1, 1, 2]),
        part("a", 3, True, "", [5]),
        part("b/c", 1, False, "code", [2, 4]),
        part("h", 2, True, "math", [3, 4]),
    ),
    {"vocab_size": VOCAB, "forced_ids": [0], "tokenizer": "t"},
)


def test_the_file_holds_everything(tmp_path):
    """Another size is made from the file alone. A weight is how often a corpus was read; with held-out tokens in the
    ranking, coverage would look complete."""
    save_counts(tmp_path / "counts.safetensors", COUNTS)
    for path in (tmp_path, tmp_path / "counts.safetensors"):
        read = load_counts(path)
        assert read.about == COUNTS.about
        named = [(one.spec, one.weight, one.held_out, one.task) for one in read.parts]
        assert named == [(one.spec, one.weight, one.held_out, one.task) for one in COUNTS.parts]
        assert read.total().tolist() == [3, 9, 4, 0, 1, 0] and read.total(held_out=True).tolist() == [0, 0, 0, 2, 2, 3]
