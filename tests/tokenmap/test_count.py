import random
from array import array

import numpy as np
import pytest

from toolkit.tokenmap import count as count_module
from toolkit.tokenmap.count import Tally, count_documents
from toolkit.tokenmap.documents import Document
from toolkit.tokenmap.token_map import TokenMapError

VOCAB = 128


def encode(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def counted(documents: list[Document]) -> Tally:
    total = Tally(VOCAB)
    for tally in count_documents(documents, encode, VOCAB):
        total.merge(tally)
    return total


def some_documents() -> list[Document]:
    draw = random.Random(1)
    return [
        Document("".join(draw.choices("abcdef ", k=draw.randrange(9))), draw.choice(["", "x"]), draw.random() < 0.2)
        for _ in range(500)
    ]


def test_every_token_is_counted_under_its_task_and_split():
    """Texts are encoded in batches; a mixed-up order would give one task's tokens to another."""
    documents = some_documents()
    tally = counted(documents)
    for key in ((False, ""), (False, "x"), (True, ""), (True, "x")):
        text = "".join(one.content for one in documents if (one.held_out, one.task) == key)
        expected = np.bincount([ord(letter) for letter in text], minlength=VOCAB)
        assert (tally.counts[key] == expected).all()
    assert tally.documents == 500
    assert (tally.total(False) + tally.total(True)).sum() == sum(len(one.content) for one in documents)


@pytest.mark.parametrize(
    "sizes", [{"BATCH_CHARACTERS": 1}, {"BATCH_DOCUMENTS": 3}, {"BATCH_DOCUMENTS": 2, "PART_CHARACTERS": 10}]
)
def test_counts_do_not_depend_on_how_the_work_is_cut(monkeypatch, sizes):
    """The sizes bound the memory; losing the last batch would drop the end of a corpus."""
    whole = counted(some_documents())
    for name, size in sizes.items():
        monkeypatch.setattr(count_module, name, size)
    parts = list(count_documents(some_documents(), encode, VOCAB))
    assert (len(parts) > 50) == ("PART_CHARACTERS" in sizes)
    again = counted(some_documents())
    assert again.documents == whole.documents and again.counts.keys() == whole.counts.keys()
    assert all((again.counts[key] == whole.counts[key]).all() for key in whole.counts)


def test_ids_are_counted_as_they_are():
    """Rollouts hold the ids that the target wrote; encoding their text again may give others."""
    assert counted([Document([5, 5, 7]), Document([]), Document("")]).total(False)[[5, 7]].tolist() == [2, 1]


@pytest.mark.parametrize("ids", [[3, VOCAB], [-1]])
def test_an_id_of_another_tokenizer_is_an_error(ids):
    """Ids out of range mean the corpus was tokenised with another model's tokenizer: every count would be wrong."""
    with pytest.raises(TokenMapError, match="target's own tokenizer"):
        counted([Document(ids)])


@pytest.mark.parametrize("order", [1, -1])
def test_a_field_that_is_no_small_set_of_tasks_is_not_one(order):
    """An id in a field `task` would make a table of millions of rows; who counts first must change nothing."""
    several = [counted([Document("a", f"task {n}") for n in range(start, start + 40)]) for start in (0, 40)]
    total = Tally(VOCAB)
    for one in several[::order]:
        assert not one.many_tasks
        total.merge(one)
    total.merge(counted([Document("b", "task 3", held_out=True)]))
    assert total.many_tasks and set(total.counts) == {(False, ""), (True, "")}
    assert total.total(False)[ord("a")] == 80 and total.total(True)[ord("b")] == 1


def test_merging_does_not_change_the_part():
    """A tally that shared its arrays with a part would count later parts twice."""
    part, total = Tally(VOCAB), Tally(VOCAB)
    part.add((False, ""), array("q", [1]))
    total.merge(part)
    total.merge(part)
    assert total.total(False)[1] == 2 and part.total(False)[1] == 1
