"""Names that DeepSpeed, accelerate, transformers and uvicorn do not document, and which of our files uses them.

A version without one would fail in the middle of a training, or give a gradient norm of None and not fail at all.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ("train/accelerator.py", "deepspeed.ops", "__compatible_ops__"),
        ("train/accelerator.py", "deepspeed.ops.op_builder.cpu.comm", "deepspeed_shm_comm"),
        ("train/accelerator.py", "deepspeed.runtime.zero.partition_parameters", "ds_tensor ds_numel"),
        ("train/optimizer.py", "deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam use_muon ns_method"),
        ("train/loop.py", "deepspeed.runtime.engine", "get_global_grad_norm"),
        ("train/loop.py", "accelerate.utils.deepspeed", "self.engine.step"),  # inside backward()
        ("train/loop.py", "accelerate.accelerator", "self.step"),
        ("train/state.py", "deepspeed.runtime.engine", "dp_world_size"),
        ("train/state.py", "deepspeed.runtime.zero.stage_1_and_2", "_hp_mapping single_partition_of_fp32_groups"),
        ("train/state.py", "deepspeed.utils.tensor_fragment", "lp_fragment_address"),
        ("train/state.py", "deepspeed.checkpoint.constants", "param_slice_mappings base_optimizer_state"),
        ("train/state.py", "deepspeed.checkpoint.constants", "single_partition_of_fp32_groups optimizer_state_dict"),
        ("train/state.py", "deepspeed.checkpoint.constants", "zero_pp_rank_ _optim_states.pt mp_rank_ _model_states"),
        ("train/state.py", "accelerate.utils.constants", "pytorch_model"),
        ("train/accelerator.py", "accelerate.state", "ACCELERATE_USE_DEEPSPEED ACCELERATE_MIXED_PRECISION"),
        ("train/accelerator.py", "accelerate.state", "ACCELERATE_USE_FSDP ACCELERATE_USE_MEGATRON_LM"),
        ("train/accelerator.py", "transformers.integrations.deepspeed", "unset_hf_deepspeed_config"),
        ("train/target_side.py", "transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
        ("train/row_split.py", "transformers.configuration_utils", "_attn_implementation_internal"),
        ("infer/server/replies.py", "transformers.convert_slow_tokenizer", "bytes_to_unicode"),
        ("infer/server/app.py", "uvicorn.server", "handle_exit on_tick should_exit"),
    ],
)
def test_the_others_still_have_the_names_that_we_use(ours: str, theirs: str, names: str) -> None:
    """Looked for in the source, because most are attributes of objects that only a training has."""
    found = find_spec(theirs)
    assert found is not None and found.origin, f"{theirs} is gone, of which toolkit/{ours} uses {names}"
    source = Path(found.origin).read_text(encoding="utf-8")
    gone = [name for name in names.split() if not re.search(rf"\b{re.escape(name)}\b", source)]
    assert not gone, f"{theirs} has no {' and no '.join(gone)} any more, which toolkit/{ours} uses"
