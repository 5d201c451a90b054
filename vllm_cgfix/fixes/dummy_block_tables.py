"""``dummy-block-tables``: dummy batches route no recurrent state to live blocks (PR 49757).

The layers of a hybrid model (mamba, gated delta net) write their state through the first column of
the block table, so that a slot mapping of -1 does not stop them. Up to 0.26.0 the rows of a dummy
batch hold what is left of real batches: in the V1 runner a row that a request has moved away from
or (up to 0.18.1) has finished in, in the V2 runner what the last real step has gathered. Those
blocks belong to other requests by then, or are being filled by a KV transfer.

Here the rows of a dummy batch are the null block:

* V1 runner: the device's rows, for as many requests as the batch is padded to. Upstream clears the
  host's row when a request moves away, which leaves rows of live requests in reach; the rows here
  are cleared at the only place that is about dummy batches. On 0.23.0 to 0.26.0 the metadata of
  a dummy batch that replays a FULL graph is also built as it was for the capture, as upstream does
  it from 0.27.0 on: with speculative decoding, the state indices of the graph are in buffers which
  the builders write for real drafts, or for a capture. Before 0.23.0 query starts do not allow it.
* V2 runner: ``get_dummy_block_tables`` clears the rows that it hands out.

0.11.x needs no more than ``dispatch-order``, which does the same for its FULL dummy batches.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Expect, Insert, OneOf, Replace, Step
from ..fix import Fix
from .v1_dummy_run import MODULE, QUALNAME

_NULL = "null_block_tables(self.input_batch.block_table, num_reqs_padded)"
_COMMIT = "self.input_batch.block_table.commit_block_table(num_reqs_padded)"
# Up to 0.18.1.
_ENDS = "cum_num_tokens, _ = self._get_cumsum_and_arange(num_scheduled_tokens)"
_STARTS = "self.query_start_loc.np[1 : num_reqs + 1] = cum_num_tokens"
# From 0.23.0 on.
_PADDED_STARTS = (
    "self.query_start_loc.np[num_reqs + 1 : num_reqs_padded + 1].fill(cum_num_tokens[-1])"
)
_COPY_STARTS = "self.query_start_loc.copy_to_gpu()"
_BUILD = "attn_metadata, _ = self._build_attention_metadata(...)"
_AS_FOR_CAPTURE = Replace(
    "is_graph_capturing",
    by="... or cudagraph_runtime_mode == CUDAGraphMode.FULL",
    within=(
        "attn_metadata, _ = self._build_attention_metadata(\n"
        "    num_tokens=..., num_tokens_padded=..., num_reqs=..., max_query_len=...,\n"
        "    ubatch_slices=..., for_cudagraph_capture=is_graph_capturing, slot_mappings=...,\n"
        "    use_spec_decode=...,\n"
        ")"
    ),
)
_HYBRID = (
    r"(mamba\w*|gdn|gated.delta.?net|hybrid|linear.attention|qwen3.next|kimi|jamba|nemotron.?h)"
)
_WRONG = r"(wrong\w*|garbage|gibberish|corrupt\w*|nan|incorrect\w*)"


def _dummy_run(*steps: Step) -> tuple[EditFunction]:
    imports = "from vllm_cgfix.fixes.v1_dummy_run import null_block_tables"
    return (EditFunction(QUALNAME, steps, imports=imports),)


FIX = Fix(
    id="dummy-block-tables",
    title="the block-table rows of a dummy batch are the null block",
    symptom=(
        "hybrid models (mamba, gated delta net) answer wrongly after an idle step or a P/D "
        "transfer: dummy batches write recurrent state through stale block-table rows"
    ),
    error_patterns=(
        rf"\b{_HYBRID}\b.*\b{_WRONG}\b|\b{_WRONG}\b.*\b{_HYBRID}\b",
        r"block.?table.*\bstale\b|\bstale\b.*block.?table",
    ),
    upstream=("PR 49757", "PR 37728"),
    scope="V1 runner and V2 runner",
    releases=(
        *("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0"),
        *("0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2"),
        *("0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0"),
    ),
    separate=True,
    edits={
        MODULE: (
            OneOf(
                (
                    # 0.12.0, where a dummy batch finds the rows that the last real step copied.
                    _dummy_run(
                        Insert(_NULL, before=f"{_ENDS}\n{_STARTS}\n{_COPY_STARTS}\n{_BUILD}")
                    ),
                    # From 0.13.0 on.
                    _dummy_run(
                        Insert(
                            _NULL,
                            before=f"{_ENDS}\n{_STARTS}\n{_COPY_STARTS}\npad_attn = ...\n{_BUILD}",
                        )
                    ),
                    # From 0.19.0 on it copies the host's rows first.
                    _dummy_run(
                        Expect("self.query_start_loc.np[...].fill(...)", times=0),
                        Insert(_NULL, after=f"{_STARTS}\n{_COPY_STARTS}\n{_COMMIT}"),
                    ),
                    # From 0.23.0 on.
                    _dummy_run(
                        Expect("dcp_dummy_context_len = ...", times=0),
                        Insert(
                            _NULL, after=f"{_STARTS}\n{_PADDED_STARTS}\n{_COPY_STARTS}\n{_COMMIT}"
                        ),
                        _AS_FOR_CAPTURE,
                    ),
                    # 0.26.0, which needs real rows where it warms up decode context parallelism.
                    _dummy_run(
                        Insert(
                            f"if dcp_dummy_context_len == 0:\n    {_NULL}",
                            after=(
                                f"{_STARTS}\n{_PADDED_STARTS}\n{_COPY_STARTS}\n"
                                f"prepare_dcp_dummy_context_metadata(...)\n{_COMMIT}"
                            ),
                        ),
                        _AS_FOR_CAPTURE,
                    ),
                ),
            ),
        ),
        "vllm.v1.worker.gpu.block_table": (
            EditFunction(
                "BlockTables.get_dummy_block_tables",
                (
                    Replace(
                        "block_table[:num_reqs]",
                        by="....zero_()",
                        within=(
                            "return tuple(block_table[:num_reqs]"
                            " for block_table in self.input_block_tables)"
                        ),
                    ),
                ),
            ),
        ),
    },
    witnesses=(
        "vllm/v1/attention/backends/gdn_attn.py",
        "vllm/v1/attention/backends/mamba_attn.py",
        "vllm/v1/utils.py",
        "vllm/v1/worker/block_table.py",
    ),
)
