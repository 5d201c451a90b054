"""``dispatch-order``: the V1 runner asks the dispatcher before it decides on metadata.

A data-parallel rank with nothing to do runs ``_dummy_run`` beside its busy peers. In 0.11.0 to
0.11.2 that method builds attention metadata only when its *caller* asked for FULL, and asks the
cudagraph dispatcher afterwards. Where the dispatcher then answers FULL, the graph is replayed
without metadata: its kernels read what the last real step left in the persistent buffers.

Asking earlier (PR 27382) is not enough on its own: measured on an H200, the rebuilt ``seq_lens``
with the last real step's slots overwrites cached KV blocks that the unfixed code left alone. So
four things are done together or not at all:

* the dispatcher is asked first (PR 27382);
* the metadata is that of the batch descriptor that will be replayed, not that of the one token
  that an idle rank brings: beside a busy rank the dispatcher answers with the busy rank's size;
* every slot of a dummy batch is -1 and its block-table rows are the null block, so that it
  writes neither attention K/V (PR 39444) nor recurrent state (PR 49757);
* the pinned buffers are written inside ``synchronize_input_prep()`` (PR 34866), since the copies
  of the step before may still be reading them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..code_edit import EditFunction, Insert, Move, Rename, Wrap
from ..fix import Fix
from .v1_dummy_run import (
    BUILD_METADATA,
    MODULE,
    NO_METADATA,
    QUALNAME,
    null_block_tables,
    pad_slots,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass
class DummyBatch:
    """The requests for which a dummy run builds attention metadata.

    Attributes:
        num_tokens: tokens of all requests.
        num_reqs: number of requests.
        max_query_len: query length that the metadata is built for.
        num_scheduled_tokens: query length of each request, shape ``[num_reqs]``, int32.
        seq_lens: sequence length of each request, shape ``[num_reqs]``, or one for all.
        ubatch_slices: the runner's microbatches, or None.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    num_scheduled_tokens: np.ndarray[Any, Any]
    seq_lens: Any
    ubatch_slices: list[Any] | None


def prepare_dummy_batch(runner: Any, batch_descriptor: Any, batch: DummyBatch) -> DummyBatch:
    """Make a dummy run harmless, and fit it to the FULL graph that will be replayed.

    Called by the edited ``_dummy_run`` before it builds attention metadata.

    Args:
        runner: the ``GPUModelRunner``.
        batch_descriptor: the ``BatchDescriptor`` of the graph to be replayed; None if the run
            replays no FULL graph.
        batch: the dummy batch as ``_dummy_run`` made it.

    Returns:
        ``batch`` itself, or the batch of the descriptor where data-parallel padding makes it
        larger: with the tokens, the requests and the longest query with which that graph was
        captured, which every metadata builder is known to accept for it.
    """
    if batch_descriptor is not None and batch_descriptor.num_tokens != batch.num_tokens:
        batch = _batch_of(runner, batch_descriptor, batch.ubatch_slices)
    block_table = runner.input_batch.block_table
    pad_slots(block_table)
    null_block_tables(block_table, batch.num_reqs)
    return batch


def _batch_of(runner: Any, batch_descriptor: Any, ubatch_slices: list[Any] | None) -> DummyBatch:
    import numpy as np

    num_tokens = batch_descriptor.num_tokens
    if batch_descriptor.uniform_decode:
        max_query_len = runner.uniform_decode_query_len
        num_reqs = -(-num_tokens // max_query_len)
        num_scheduled_tokens = np.full(num_reqs, max_query_len, dtype=np.int32)
        num_scheduled_tokens[-1] -= num_reqs * max_query_len - num_tokens
    else:
        max_query_len = num_tokens
        num_reqs = min(num_tokens, runner.scheduler_config.max_num_seqs)
        num_scheduled_tokens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
        num_scheduled_tokens[: num_tokens % num_reqs] += 1
    return DummyBatch(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        num_scheduled_tokens=num_scheduled_tokens,
        # No context: every request is exactly its own query.
        seq_lens=np.minimum(num_scheduled_tokens, runner.max_model_len),
        ubatch_slices=_ubatches(ubatch_slices, num_scheduled_tokens),
    )


def _ubatches(
    ubatch_slices: list[Any] | None, num_scheduled_tokens: np.ndarray[Any, Any]
) -> list[Any] | None:
    """The runner's two microbatches, widened to all of these requests."""
    if ubatch_slices is None:
        return None
    import numpy as np

    ends = np.cumsum(num_scheduled_tokens)
    split = ubatch_slices[0].token_slice.stop
    make = type(ubatch_slices[0])
    # A request that has tokens on both sides of the split belongs to both microbatches.
    first_stop = int(np.searchsorted(ends, split, side="left")) + 1
    second_start = int(np.searchsorted(ends, split, side="right"))
    return [
        make(slice(0, first_stop), slice(0, split)),
        make(slice(second_start, len(ends)), slice(split, int(ends[-1]))),
    ]


_ASK_DISPATCHER = """\
_cg_mode, batch_descriptor = (
    self.cudagraph_dispatcher.dispatch(...) if not is_profile else (CUDAGraphMode.NONE, None)
)
if cudagraph_runtime_mode is not None: ...
else: ...
"""
# All in a row: what comes between could rely on the old names.
_FILL_BUFFERS = """\
self.seq_lens.np[:num_reqs] = seq_lens
self.seq_lens.np[num_reqs:] = 0
self.seq_lens.copy_to_gpu()
cum_num_tokens, _ = self._get_cumsum_and_arange(num_scheduled_tokens)
self.query_start_loc.np[1 : num_reqs + 1] = cum_num_tokens
self.query_start_loc.copy_to_gpu()
"""

FIX = Fix(
    id="dispatch-order",
    title="the dummy batch of the V1 runner has the metadata of the FULL graph that it replays",
    symptom=(
        "a data-parallel rank with nothing to do replays a FULL CUDA graph without attention "
        "metadata: FlashInfer can hang, cached KV blocks are overwritten, later answers are wrong"
    ),
    error_patterns=(
        r"execute_dummy_batch",
        r"dummy batch|dummy_run.*(hang|stuck|illegal)",
        r"\b(hangs?|hung|stuck|timed? ?out)\b.*\b(data.parallel|dp|dummy|idle|rank)",
        r"\b(data.parallel|dp|dummy|idle|rank)\b.*\b(hangs?|hung|stuck|timed? ?out|garbage|nan)\b",
        r"watchdog caught collective operation timeout",
        r"\b(kv|cached?)\b.*\b(overwrit|corrupt)|\b(overwrit|corrupt)\w*\b.*\b(kv|cached?)\b",
        r"\bwrong\b.*\b(answer|output|token)|\b(answer|output|token)s?\b.*\bwrong\b",
    ),
    upstream=("PR 27382", "PR 39444", "PR 34866", "PR 49757"),
    scope="V1 runner",
    releases=("0.11.0", "0.11.1", "0.11.2"),
    edits={
        MODULE: (
            EditFunction(
                QUALNAME,
                (
                    Move(_ASK_DISPATCHER, before=f"{NO_METADATA}\n{BUILD_METADATA}"),
                    Rename(
                        start=_FILL_BUFFERS,
                        names={
                            name: f"dummy_batch.{name}"
                            for name in (
                                "num_tokens",
                                "num_reqs",
                                "max_query_len",
                                "num_scheduled_tokens",
                                "seq_lens",
                                "ubatch_slices",
                            )
                        },
                    ),
                    Insert(
                        "from vllm_cgfix.fixes.dispatch_order import (\n"
                        "    DummyBatch, prepare_dummy_batch\n"
                        ")\n"
                        "dummy_batch = prepare_dummy_batch(\n"
                        "    self,\n"
                        "    batch_descriptor if cudagraph_runtime_mode == CUDAGraphMode.FULL\n"
                        "    else None,\n"
                        "    DummyBatch(num_tokens, num_reqs, max_query_len,\n"
                        "               num_scheduled_tokens, seq_lens, ubatch_slices),\n"
                        ")\n"
                        "ubatch_slices = dummy_batch.ubatch_slices",
                        before="self.seq_lens.np[:dummy_batch.num_reqs] = dummy_batch.seq_lens",
                    ),
                    Insert(
                        "self.query_start_loc.np[dummy_batch.num_reqs + 1 :] = cum_num_tokens[-1]",
                        after=(
                            "self.query_start_loc.np[1 : dummy_batch.num_reqs + 1] = cum_num_tokens"
                        ),
                    ),
                    Wrap(BUILD_METADATA, context="self.synchronize_input_prep()"),
                ),
            ),
        ),
    },
    witnesses=(
        "vllm/compilation/cuda_graph.py",
        "vllm/forward_context.py",
        "vllm/v1/attention/backends/flash_attn.py",
        "vllm/v1/attention/backends/flashinfer.py",
        "vllm/v1/attention/backends/gdn_attn.py",
        "vllm/v1/attention/backends/mamba1_attn.py",
        "vllm/v1/attention/backends/mamba2_attn.py",
        "vllm/v1/attention/backends/mamba_attn.py",
        "vllm/v1/attention/backends/mla/common.py",
        "vllm/v1/attention/backends/short_conv_attn.py",
        "vllm/v1/attention/backends/triton_attn.py",
        "vllm/v1/attention/backends/utils.py",
        "vllm/v1/cudagraph_dispatcher.py",
        "vllm/v1/utils.py",
        "vllm/v1/worker/block_table.py",
        "vllm/v1/worker/dp_utils.py",
        "vllm/v1/worker/gpu_input_batch.py",
        "vllm/v1/worker/gpu_ubatch_wrapper.py",
        "vllm/v1/worker/ubatch_splitting.py",
        "vllm/v1/worker/ubatch_utils.py",
    ),
)
