"""What the fixes of the V1 runner's ``_dummy_run`` share: its places, and what they call there."""

from __future__ import annotations

from typing import Any

MODULE = "vllm.v1.worker.gpu_model_runner"
QUALNAME = "GPUModelRunner._dummy_run"

NO_METADATA = "attn_metadata: ... = None"
BUILD_METADATA = "if force_attention or cudagraph_runtime_mode == CUDAGraphMode.FULL: ..."
# Up to 0.14.1: later releases pass slot mappings, too, and have made them before.
BUILD_WITHOUT_SLOTS = (
    "attn_metadata, _ = self._build_attention_metadata(\n"
    "    num_tokens=..., num_reqs=..., max_query_len=..., ubatch_slices=...,\n"
    "    for_cudagraph_capture=...,\n"
    ")"
)


def pad_slots(block_table: Any) -> None:
    """Set every slot of every KV cache group to -1, at which no kernel stores K/V.

    The buffers as a whole: a FULL graph reads them over all tokens for which it was captured. A
    real step writes those of its own tokens anew.

    Args:
        block_table: the ``MultiGroupBlockTable`` of the runner's input batch.
    """
    for table in block_table.block_tables:
        table.slot_mapping.gpu.fill_(-1)


def null_block_tables(block_table: Any, num_reqs: int) -> None:
    """Point the first rows of every KV cache group at the null block, on the device.

    Hybrid models write their recurrent state through these rows, whatever the slots are. The
    host's rows are left alone: a real step copies those of its requests anew.

    Args:
        block_table: the ``MultiGroupBlockTable`` of the runner's input batch.
        num_reqs: number of rows.
    """
    for table in block_table.block_tables:
        # On a CPU runner the two are one buffer, and clearing it would lose the rows of live
        # requests; there are no graphs there.
        if table.block_table.gpu is not table.block_table.cpu:
            table.block_table.gpu[:num_reqs].fill_(0)
