"""A linear layer whose weight lies in a form that only multiplies: packed for this CPU, or quantised.

Such a form is no tensor that can be written to a file or copied, so a model that has it would lose its weights without
a word (its buffers stand in no state dict), or fail somewhere inside torch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from toolkit.targets.errors import TargetError


class FixedLinear(nn.Module):
    """Base of layers that compute and can be neither copied, nor pickled, nor saved, nor loaded into."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # what copy, deepcopy and pickle ask
        raise self._refusal("copied or pickled")

    def _save_to_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("saved")

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("loaded into")

    def _refusal(self, what: str) -> TargetError:
        return TargetError(
            f"a model with a {type(self).__name__} ({self.extra_repr()}) cannot be {what}: its weights lie as this "
            "CPU's products read them, or are quantised. Load the target anew without a quantization, and copy or save "
            "it before it is packed (toolkit.targets.load.load_target does not pack; opening an engine does)"
        )
