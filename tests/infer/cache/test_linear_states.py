"""States of linear-attention layers: what one text leaves in a row is not taken for another's."""

from __future__ import annotations

import torch

from toolkit.infer.cache.linear_states import LinearStates, StateShape

PAGE = 4
SHAPE = StateShape(1, (2, 3), torch.float32, (1, 2, 2), torch.float32)


def read(states: LinearStates, start: int, end: int, value: float) -> None:
    """A forward over a prompt's tokens start .. end-1 in row 0, after which the states are `value`."""
    rows = states.prompt(0, [start])
    rows.update_conv_state(torch.full((1, 2, end - start), value), 1)
    rows.update_recurrent_state(torch.full((1, 1, 2, 2), value), 1)
    states.end_prompt([end])


def test_the_end_of_a_page_belongs_to_its_text():
    """A text that ends between pages has no states to keep until it passes the end of one; those of the text before it
    in the row would be found by another prompt."""
    states = LinearStates([SHAPE], 2, torch.device("cpu"), PAGE)
    read(states, 0, PAGE, 1.0)
    kept = states.snapshot(0)
    assert kept.position == PAGE and float(kept.recurrent[1].mean()) == 1.0
    read(states, 0, PAGE + 1, 2.0)  # another text, read at once past the end of its first page
    assert states.snapshot(0) is None
    read(states, PAGE + 1, 2 * PAGE, 3.0)
    assert states.snapshot(0).position == 2 * PAGE
    states.move_row(1, 0)
    assert states.snapshot(1).position == 2 * PAGE and float(states.snapshot(1).conv[1][0, -1]) == 3.0


def test_a_forward_that_was_not_ended_changes_nothing():
    """It failed; the next one starts from the same states."""
    states = LinearStates([SHAPE], 1, torch.device("cpu"), PAGE)
    read(states, 0, PAGE, 1.0)
    rows = states.prompt(0, [PAGE])
    rows.update_recurrent_state(torch.full((1, 1, 2, 2), 9.0), 1)
    assert float(states.prompt(0, [PAGE]).get_recurrent_state(1).mean()) == 1.0


def test_commit_takes_the_accepted_node_and_the_end_of_a_page():
    """Rows accept different numbers of nodes; one passes the end of a page on the way."""
    states = LinearStates([SHAPE], 2, torch.device("cpu"), PAGE)
    rows = states.nodes(2)
    rows.update_conv_state(torch.arange(1.0, 4.0).expand(2, 2, 3), 1)
    rows.running = [torch.full((2, 1, 2, 2), float(node)) for node in (1, 2, 3)]
    rows.update_recurrent_state(rows.running[-1], 1)
    states.commit(torch.tensor([2, 2]), torch.tensor([2, 0]))  # tokens 3 .. 5, and 3
    states.observe([2, 2], [2, 0])
    assert [float(one.mean()) for one in states.recurrent[1]] == [3.0, 1.0]
    assert states.conv[1][:, 0].tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]
    assert states.snapshot(0).position == PAGE and float(states.snapshot(0).recurrent[1].mean()) == 2.0
    assert states.snapshot(1) is None
