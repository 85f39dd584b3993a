"""What rank 0 tells the others, in the order in which it does it itself."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


@dataclass(frozen=True)
class Open:
    """Join the group whose store is at `port`, as that rank, and open the engine. options: open_engine's."""

    rank: int
    size: int
    port: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Add:
    """A request; arrival: its number in the engine of each rank."""

    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    speculative: bool
    shape: DraftShape | None
    states_seed: bool  # `params` came with a seed; they always have one here


@dataclass(frozen=True)
class Abort:
    """End the request of that arrival."""

    arrival: int


@dataclass(frozen=True)
class Step:
    """One round. written: what `written` gives on rank 0 before it."""

    written: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Reshape:
    """Draft with that shape from now on."""

    shape: DraftShape


@dataclass(frozen=True)
class Decided:
    """What rank 0 decided within a round."""

    value: Any


@dataclass(frozen=True)
class Stop:
    """End in order."""


Message = Open | Add | Abort | Step | Reshape | Decided | Stop


def written(running: Sequence[Request]) -> tuple[tuple[int, int, int], ...]:
    """Per row: which request, how many tokens it has, the last one. The same on all ranks before every round."""
    return tuple((request.arrival, len(request.output_ids), request.output_ids[-1]) for request in running)


def send(message: Message, pipe: IO[bytes]) -> None:
    """Raises OSError when nobody reads the pipe."""
    pipe.write(pickle.dumps(message))
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """The next order of our own rank 0. Raises EOFError when it has gone, UnpicklingError when it went amid one."""
    message: Message = pickle.load(pipe)
    return message
