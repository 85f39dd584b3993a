"""What is decided in place of the target: acceptance by chance (benchmarks of hardware), and given answers (forecasts).

Acceptance by chance: a step accepts drafts on the tree's deepest path, from the root on. How many is drawn from the
rates; the target's choices do not matter. The target chooses the token after them. All else is computed as usual, so
the times are those of a head with this accept_length. The text that is written has no meaning.

An accept_length becomes the rates of least variance, as in vLLM's `synthetic_acceptance_length`:

    accept_length 3.6  ->  rates 1 1 0.6       every step accepts 2 drafts, 60 % of the steps a third one

The chance is a pure function of the last committed token and its position, so a run can be repeated, and a recorded
round needs no generator.

With given answers every node chooses the answer's token at its position, so the accepted text is the answer.

Shapes: B rows, N nodes a row, D depths of the rates, L tokens of the longest given answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.errors import DraftShapeError, EngineError
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload
from toolkit.infer.verify.token_distribution import Stream, round_uniform

NO_TOKEN = -1  # equals no choice


@dataclass(frozen=True)
class ForcedAcceptance:
    """rates: by depth from 1, the share of the steps that accept it, of those that accepted the depth before."""

    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> ForcedAcceptance:
        """Parse an accept_length ("2.6", at least 1) or rates by depth ("0.8,0.6"). Raises EngineError."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and 1 <= numbers[0] < float("inf"):
            whole, part = divmod(numbers[0] - 1, 1)
            return cls((1.0,) * int(whole) + ((round(part, 9),) if part > 0 else ()))
        if len(numbers) > 1 and all(0 <= number <= 1 for number in numbers):
            return cls(tuple(numbers))
        raise EngineError(
            f'forced accept_length "{text}": one number of at least 1 is needed (2.6: tokens per verify step, the '
            "bonus token included), or several rates from 0 to 1, one for each depth (0.8,0.6)"
        )

    @property
    def accept_length(self) -> float:
        """The mean number of tokens committed per verify step, bonus token included."""
        return round(1 + sum(accumulate(self.rates, mul)), 9)

    def check_shapes(self, shapes: Sequence[DraftShape]) -> None:
        """Raise DraftShapeError if one of the shapes is not as deep as the rates."""
        for shape in shapes:
            depth = min(shape.num_steps, shape.num_draft_tokens - 1)
            if depth < len(self.rates):
                raise DraftShapeError(
                    f"forced accept_length {self.accept_length:g} needs drafts of depth {len(self.rates)}, and a "
                    f"{shape.name} ({shape.as_text()}) has depth {depth}, so at most accept_length {depth + 1}: force "
                    "less, or draft deeper"
                )

    def __call__(self, tree: DraftTree, choices: Tensor, roots: Tensor, lengths: Tensor) -> tuple[DraftTree, Tensor]:
        """Return the tree and the choices [B, N] whose accepted path is the forced one.

        The tree keeps its tokens on that path only, so that the path ends where the rates say. choices [B, N]: the
        target's. roots, lengths [B]: the last committed token of each row and its position.
        """
        if tree.nodes == 1:  # a plain step
            return tree, choices
        depths = tree.depths.masked_fill(~tree.valid, NO_TOKEN)
        deepest = depths.argmax(dim=1)[:, None, None].expand(-1, 1, tree.nodes)
        forced = (
            tree.mask.gather(1, deepest)[:, 0] & (depths >= 1) & (depths <= self._accepted(roots, lengths)[:, None])
        )
        tokens = torch.where(forced, tree.tokens, NO_TOKEN)
        # The choice at the parent of a node on the path is that node's token. Other nodes write to one more column.
        widened = torch.nn.functional.pad(choices, (0, 1))
        parents = torch.where(forced, tree.parents, tree.nodes)
        return replace(tree, tokens=tokens), widened.scatter(1, parents, tokens)[:, :-1].contiguous()

    def _accepted(self, roots: Tensor, lengths: Tensor) -> Tensor:
        """Return how many drafts each row accepts, [B]."""
        rates = _on_device(self.rates, roots.device)
        depth = torch.arange(len(rates), device=rates.device)
        coins = round_uniform(roots[:, None], lengths[:, None], depth, Stream.COIN)
        return (coins < rates).long().cumprod(dim=1).sum(dim=1)


@cache  # never freed: recorded rounds read it
def _on_device(rates: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the rates, [D] fp64. A copy to the device cannot be recorded."""
    return upload(rates, device, torch.float64)


class ForcedAnswers:
    """The tokens of `Request.forced_ids` in place of the target's choices. Rows without forced ids keep the choices."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        answers = [torch.tensor(one.forced_ids or [NO_TOKEN]) for one in requests]
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=NO_TOKEN)
        self._ids = padded.to(device)  # [B, L]
        self._begins = upload([[len(one.prompt_ids)] for one in requests], device)

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> ForcedAnswers | None:
        """None if no request has forced ids."""
        return cls(requests, device) if any(one.forced_ids for one in requests) else None

    def __call__(self, choices: Tensor, positions: Tensor) -> Tensor:
        """choices, positions [B, n]: the target's tokens and their indices in the sequence. Returns the tokens [B, n].

        Nodes past the end of an answer keep the target's choice; the request ends before it."""
        at = (positions - self._begins).clamp(max=self._ids.shape[1] - 1)
        forced = self._ids.gather(1, at)
        return torch.where(forced == NO_TOKEN, choices, forced)
