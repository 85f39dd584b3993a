import torch

from toolkit.tokenmap.counts import Corpus, CorpusCounts, Counts, load_counts, save_counts

VOCAB = 6


def corpus_counts(spec: str, weight: int, held_out: bool = False, **by_task: list[int]) -> CorpusCounts:
    """Counts of ids by task; the task "unseen" stands for held-out rollouts."""
    counts = {
        (task == "unseen", "" if task in ("plain", "unseen") else task): torch.bincount(
            torch.tensor(ids), minlength=VOCAB
        )
        for task, ids in by_task.items()
    }
    return CorpusCounts(Corpus(spec, weight), counts, len(by_task), held_out)


def some_counts() -> Counts:
    corpora = (
        corpus_counts("a", 3, plain=[0, 1], math=[1, 1, 2], unseen=[5]),
        corpus_counts("b/c", 1, plain=[2], code=[4]),
        corpus_counts("h", 2, held_out=True, math=[3], unseen=[4]),
    )
    return Counts(corpora, {"vocab_size": VOCAB, "forced_ids": [0], "tokenizer": "t", "roles": ["user"]})


def test_weights_multiply_counts_and_held_out_text_is_not_ranked():
    """A weight is how often a corpus was read; with held-out tokens in the ranking, coverage would look complete."""
    counts = some_counts()
    assert counts.total().tolist() == [3, 9, 4, 0, 1, 0]
    held_out = counts.held_out_counts()
    assert held_out is not None and held_out.tolist() == [0, 0, 0, 2, 2, 3]
    assert Counts(counts.corpora[1:2], counts.about).held_out_counts() is None
    assert {task: one.tolist() for task, one in counts.corpora[0].by_task().items()} == {"math": [0, 2, 1, 0, 0, 0]}
    assert list(counts.corpora[2].by_task()) == ["math"]


def test_the_file_holds_everything(tmp_path):
    """Another size, or other weights, are made from the file alone."""
    save_counts(tmp_path / "counts.safetensors", some_counts())
    for path in (tmp_path, tmp_path / "counts.safetensors"):
        read = load_counts(path)
        assert read.about == some_counts().about
        assert [(one.corpus, one.held_out, one.documents) for one in read.corpora] == [
            (Corpus("a", 3), False, 3), (Corpus("b/c", 1), False, 2), (Corpus("h", 2), True, 2),
        ]  # fmt: skip
        assert torch.equal(read.total(), some_counts().total())
        assert read.corpora[1].by_task().keys() == {"code"}
