"""Batches: the plan covers every example, and the mask supervises exactly what is drafted at serving."""

from __future__ import annotations

import pytest
import torch

from toolkit.data.batches import BatchPlan, Example, collate, micro_batches, process_share, supervised_mask

NINE = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)  # p p p A0 A1 A2 E \n p


def roots(mask: torch.Tensor) -> list[int]:
    return mask[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("step, expected", [(0, [2, 3, 4]), (2, [0, 1, 2]), (3, [0, 1]), (20, [])])
def test_nine_token_drawing(step: int, expected: list[int]) -> None:
    """The drawing above the code. An off-by-one would train on the prompt, on A0, or past the end of the turn."""
    assert roots(supervised_mask(NINE, step)) == expected


def test_mask_agrees_with_its_definition_on_random_rows() -> None:
    """Compares the slices with the definition, over several turns, every root and step."""
    response = torch.rand(6, 17, generator=torch.Generator().manual_seed(0)) < 0.6
    for step in range(18):
        mask = supervised_mask(response, step)
        for row in range(6):
            for t in range(17):
                inside = t + 2 + step < 17
                wanted = inside and bool(response[row, t + 1 + step]) and bool(response[row, t + 2 + step])
                assert bool(mask[row, t]) == wanted


@pytest.mark.parametrize("count, batch", [(1, 8), (37, 8)])
def test_each_epoch_holds_every_example_once(count: int, batch: int) -> None:
    """A dropped remainder or a doubled example would bias what is learned."""
    plan = BatchPlan([(i * 7919) % 301 for i in range(count)], batch, seed=3)
    batches = plan.epoch(2)
    assert sorted(sum(batches, [])) == list(range(count))
    assert len(batches) == len(plan) and max(map(len, batches)) <= batch
    assert sum(len(b) < batch for b in batches) == (count % batch != 0)


def test_plan_goes_on_from_a_position() -> None:
    """An interrupted training must see exactly the batches that an uninterrupted one would have seen."""
    plan = BatchPlan(list(range(30)), 4, 0)
    whole = plan.from_position()
    first = [next(whole) for _ in range(20)]
    epoch, index, _ = first[11]
    resumed = plan.from_position(epoch, index)
    assert [next(resumed) for _ in range(9)] == first[11:]
    assert {entry[0] for entry in first} == {0, 1, 2}


@pytest.mark.parametrize("processes", [2, 8])
def test_processes_share_a_batch_without_overlap(processes: int) -> None:
    """Two processes together must do what one does, for the curves to agree."""
    batch = [9, 4, 7, 1, 0]
    shares = [process_share(batch, rank, processes) for rank in range(processes)]
    assert sorted(sum(shares, [])) == sorted(batch)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_packed_micro_batches_stay_in_the_budget() -> None:
    """Rows beyond it would not fit into memory; unlike numbers of micro-batches would leave one process waiting."""
    lengths = [[40, 25, 12, 10, 9, 4], [33, 30, 29], []]
    shares = [[Example("", [1] * length, [True] * length) for length in share] for share in lengths]
    cut = [micro_batches(shares, rank, 1, budget=64) for rank in range(3)]
    found = [[[len(one.input_ids) for one in row] for rows in own for row in rows] for own in cut]
    assert found == [[[40], [25, 12], [10, 9, 4]], [[33], [30], [29]], []]
    assert [[len(rows) for rows in own] for own in cut] == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert [len(rows) for rows in micro_batches(shares, 0, 1, budget=80)] == [2, 1]


def test_collate_pads_right_and_never_supervises_padding() -> None:
    """Left padding would shift positions; a True on padding would train on the pad id."""
    batch = collate([Example("a", [5, 6, 7], [False, True, True]), Example("b", [8], [True])], pad_id=2)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 2, 2]]
    assert batch.response.tolist() == [[False, True, True], [True, False, False]]
    assert batch.lengths.tolist() == [3, 1]
