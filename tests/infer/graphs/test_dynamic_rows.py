"""Dynamic rows in recorded rounds, whose addresses stay while their contents change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.infer.graphs.test_graph_rounds import ROWS, answers, engine_with
from toolkit.infer.graphs.recordings import GraphSettings

KEPT = range(8)


@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
@pytest.mark.parametrize("overlap", [False, True])
def test_recorded_rounds_draft_what_eager_rounds_draft(small_target, shared_draft, recording, shape, overlap):
    """Rounds that wait for each other accept the same drafts; a round that is launched earlier does not know the ids
    of the one before it, and writes the same tokens. With the ids of the recording's time fewer drafts were right."""
    draft = replace(shared_draft("eagle2", KEPT), dynamic_rows=5)
    graphed = engine_with(small_target, draft, shape, GraphSettings(ROWS, recording, overlap=overlap))
    eager = engine_with(small_target, draft, shape, None)
    for seed in (1, 2):
        found, wanted = (answers(engine, "greedy", seed, tokens=30) for engine in (graphed, eager))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        assert overlap or found == wanted
    assert recording.recorded >= 3
    block = graphed.drafter.to_target[len(KEPT) :]
    assert set(block.tolist()) != set(range(8, 13)), "the ids of the beginning"
    assert block.data_ptr() == graphed.drafter._head.dynamic.to_target[len(KEPT) :].data_ptr()
    graphed.close(), eager.close()
