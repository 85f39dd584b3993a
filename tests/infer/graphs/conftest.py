"""What a CUDA graph does, on a CPU: the operations of one run, at the addresses they had, done again.

Numbers that the host had then are part of the recording. Whatever a capture refuses is refused here: values that reach
the host, and tensors made from the host's own numbers. Of tensors from outside it knows the address alone, as a graph
does: one that nobody else kept is found gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from toolkit.infer.cpu import attention, sampling
from toolkit.infer.kernels import reference

REFUSED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class Recording(TorchDispatchMode):
    """Call it with a function: it runs once, and what comes back runs its operations again."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # as a capture, after a run that makes tables
        self._done: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self._numbers: set[int] = set()  # of the host, which are part of what a kernel is launched with
        with self:
            run()
        inside = {_address(one) for *_, own in self._done for one in own if one is not None} | self._numbers
        done = [(call[0], *(_by_address(part, inside) for part in call[1:3]), call[3]) for call in self._done]
        self._done.clear()
        self.recorded += 1
        return lambda: _again(done)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().split(".")[0]
        by_mask = name.startswith("aten::index") and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(args[1:2])
        )
        from_host = name == "aten::lift_fresh" and args[0].dim() > 0
        assert name not in REFUSED and not by_mask and not from_host, f"{name} cannot be captured"
        if name == "aten::lift_fresh":
            self._numbers.add(_address(args[0]))
        out = function(*args, **kwargs)
        given = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        # Results of their own; views and what was written in place lie at addresses that were given.
        own = [one if _address(one) not in given else None for one in tree_leaves(out) if isinstance(one, Tensor)]
        self._done.append((function, args, kwargs, own))
        return out


@dataclass(frozen=True)
class _Outside:
    """A tensor that the recording does not own. Its memory is kept by whoever else has it, or by nobody."""

    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]  # offset, shape, strides

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, layout)

    def there(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"a recorded round reads memory that was let go: {self.dtype}, {self.layout}"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


def _by_address(values: Any, inside: set[int]) -> Any:
    """args or kwargs of a recorded operation, with the tensors from outside held weakly (of empty ones nothing is
    read)."""
    return tree_map_only(
        Tensor, lambda one: one if _address(one) in inside or not one.numel() else _Outside.of(one), values
    )


def _again(done: list[tuple[Any, tuple, dict, list[Tensor]]]) -> None:
    for function, args, kwargs, own in done:
        args, kwargs = (tree_map_only(_Outside, _Outside.there, part) for part in (args, kwargs))
        out = tree_leaves(function(*args, **kwargs))
        if function.namespace == "c10d":  # of gloo, which runs in a thread of its own
            Work.unbox(out[-1]).wait()
        fresh = [one for one in out if isinstance(one, Tensor)]
        for old, new in zip(own, fresh, strict=True):
            if old is not None:
                assert old.shape == new.shape, f"{function.name()}: a shape depended on values"
                old.copy_(new)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Operations of torch are recorded, so attention and the cut of distributions run by them."""
    monkeypatch.setattr(attention, "row_attention", lambda *_: None)
    monkeypatch.setattr(sampling, "least_kept", reference.least_kept)
    return Recording()
