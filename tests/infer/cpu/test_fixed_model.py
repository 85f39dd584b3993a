"""Models whose weights are packed or quantised: what cannot be done with them is refused by a message."""

from __future__ import annotations

import copy
import pickle

import pytest

from toolkit.errors import TargetError
from toolkit.infer.engine.cpu_door import load_target, pack

LAYERS = {None: "PackedLinear", "int8": "Int8Linear"}


@pytest.mark.parametrize("quantization", LAYERS)
def test_a_fixed_model_is_neither_copied_nor_saved(tiny_target_directory, tmp_path, quantization):
    """Its weights are not in the state dict, so a saved file would silently lack them."""
    target = load_target(tiny_target_directory, quantization=quantization)
    pack(target)
    model = target.model
    for what, act in (
        ("copied or pickled", lambda: copy.deepcopy(model)),
        ("copied or pickled", lambda: pickle.dumps(model)),
        ("saved", lambda: model.state_dict()),
        ("saved", lambda: model.save_pretrained(tmp_path / "out")),
        ("loaded into", lambda: model.load_state_dict({})),
    ):
        says = rf"a {LAYERS[quantization]} \(in_features=.*\) cannot be {what}: .* Load the target again"
        with pytest.raises(TargetError, match=says):
            act()
    assert not list(tmp_path.glob("out/*.safetensors"))
