import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from toolkit.tokenmap.build import build_token_map, coverage, forced_ids_for, problems_of, rank_ids, repaired

VOCAB = 300


def count_tokens(answers: list[list[int]], vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(sum(answers, [])), minlength=vocab_size)


def eagle_rule(answers: list[list[int]], size: int) -> tuple[list[int], list[int]]:
    """EAGLE-3's published rule, written independently: the most frequent ids, ascending, and each id minus its rank."""
    tally = Counter(token for answer in answers for token in answer)
    kept = sorted(token for token, _ in tally.most_common(size))
    return kept, [token - rank for rank, token in enumerate(kept)]


def answers_of(seed: int) -> list[list[int]]:
    """Zipf-like answers over about two thirds of the vocabulary, no two ids equally common."""
    source = random.Random(seed)
    ids = source.sample(range(VOCAB), 200)
    flat = [token for count, token in enumerate(ids, start=1) for _ in range(count)]
    source.shuffle(flat)
    return [flat[start : start + 37] for start in range(0, len(flat), 37)]


@pytest.mark.parametrize("size", [17, 200])
def test_same_map_as_eagle_on_the_same_counts(size):
    """Heads trained elsewhere on the same data must get the same draft ids; counts are distinct, so no tie decides."""
    answers = answers_of(size)
    ids, offsets = eagle_rule(answers, size)
    token_map = build_token_map(count_tokens(answers, VOCAB), size=size)
    assert token_map.ids.tolist() == ids and token_map.d2t.tolist() == offsets


def test_ties_go_to_the_lower_id():
    """A tie decided by hash order or thread count would give another vocabulary on every run."""
    assert build_token_map(torch.tensor([0, 2, 2, 2, 5]), size=3).ids.tolist() == [1, 2, 4]


def test_forced_ids_survive_a_small_size():
    """End-of-turn ids never occur in plain text; without them no answer could end on a drafted token."""
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[100:200] = torch.arange(1, 101)
    token_map = build_token_map(counts, size=5, forced_ids=(0, 299, 299))
    assert token_map.ids.tolist() == [0, 197, 198, 199, 299]


@pytest.mark.parametrize("share", [0.01, 0.95])
def test_coverage_picks_the_smallest_size_that_reaches_the_share(share):
    """One id too many costs time in every draft step; one too few misses the requested share."""
    counts = count_tokens(answers_of(5), VOCAB)
    size = build_token_map(counts, coverage=share).size
    assert coverage(counts, rank_ids(counts)[:size]) >= share - 1e-9
    assert size == 1 or coverage(counts, rank_ids(counts)[: size - 1]) < share


def test_coverage_counts_forced_ids_and_keeps_all_of_them():
    """Forced ids count towards the share, and a small share must not drop them."""
    counts = torch.tensor([90, 5, 5, 0, 0])
    assert build_token_map(counts, coverage=0.9, forced_ids=(3, 4)).ids.tolist() == [0, 3, 4]
    assert build_token_map(counts, coverage=0.5, forced_ids=(0, 3, 4)).ids.tolist() == [0, 3, 4]


def test_forced_ids_are_special_tokens_and_stop_ids():
    """Chat and tool tokens are special but never occur in plain text; ordinary added words must not be forced."""
    added = {0: SimpleNamespace(special=True), 5: SimpleNamespace(special=False), 9: SimpleNamespace(special=True)}
    tokenizer = SimpleNamespace(added_tokens_decoder=added, all_special_ids=[0, 2])
    assert forced_ids_for(tokenizer, stop_ids={7, 400}, vocab_size=VOCAB) == (0, 2, 7, 9)


LIST_VOCAB = 20
# As the published FR-Spec builder writes it: ranked by frequency, then BOS (again) and EOS.
PUBLISHED = torch.tensor([9, 1, 4, 7, 1, 2])
COUNTS = torch.zeros(LIST_VOCAB, dtype=torch.int64)
COUNTS[[9, 1, 4, 7, 12]] = torch.tensor([50, 40, 30, 20, 25])


def test_each_problem_is_named():
    """Duplicates break sampling, an id out of range crashes an engine, and a missing end of turn costs every answer."""
    found = problems_of(torch.tensor([9, 1, 4, 1, 30, -2]), LIST_VOCAB, forced_ids=(4, 5))
    assert [one.split(":")[0].split(",")[0] for one in found] == [
        "1 duplicates",
        "ids are not ascending",
        "2 ids are outside the vocabulary [0",
        "1 special ids are missing",
    ]
    assert problems_of(torch.tensor([1, 4, 9]), LIST_VOCAB, forced_ids=(4,)) == []
    assert len(problems_of(torch.tensor([3, -1]))) == 2, "without a known vocabulary"


@pytest.mark.parametrize(
    "ids, counts, kept",
    [
        # 12 is the most frequent of the other ids and takes the duplicate's place.
        (PUBLISHED, COUNTS, [1, 2, 4, 7, 9, 12]),
        (PUBLISHED, None, [1, 2, 4, 7, 9]),
        # The special ids 0 and 2 replace the least frequent by their counts; without counts no id is given up.
        (torch.tensor([9, 1, 7, 4]), COUNTS, [0, 1, 2, 9]),
        (torch.tensor([9, 1, 7, 4]), None, [0, 1, 2, 4, 7, 9]),
    ],
)
def test_repaired_maps(ids, counts, kept):
    """The size stays where it can, and no id is given up for a rarer one."""
    forced = (2,) if ids is PUBLISHED else (0, 2)
    token_map = repaired(ids, LIST_VOCAB, forced, counts)
    assert token_map.ids.tolist() == kept
    assert problems_of(token_map.ids, LIST_VOCAB, forced) == []
