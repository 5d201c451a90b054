"""``draft-dummy-slots``: the draft steps of a dummy batch write no K/V (PR 56734).

A data-parallel rank with nothing to do runs the drafter, too. The first draft pass of such a dummy
batch has the slots of the target model's dummy batch, which are all -1. For each later draft step
the V2 runner computes slots anew, through the block tables of the request states 0, 1, 2 and so on:
those of requests that have finished, or wait. The drafter then writes what it makes of the dummy
batch over their K/V. The prefix cache still hands out these blocks, so that a conversation that
hits them has no draft token accepted, until the prefix cache is reset.

Upstream names no request in a dummy batch, and its kernel computes -1 for that. A kernel cannot be
edited here: Triton reads its source file. In 0.21.0 to 0.27.1 the slots of every draft step are
computed outside of the step's graph, in the buffer that the graph reads, so that filling that
buffer with -1 leaves it as upstream's kernel does. It is done before attention metadata is built
on it. A real step pays for one ``if`` more.

The fault is known and not fixed

* in 0.17.0 to 0.20.2, where the loop over draft steps is inside the captured graph, with the slots
  of all steps but its first;
* in 0.28.0 to 0.30.0, where it is so with each attention backend that can update its metadata
  within the graph (``_fused_multi_step_decode``).

Eagle and MTP drafters share the edited code, and Gemma4's, which writes no K/V. DFlash and DSpark
(from 0.24.0 on) do not compute slots through request states: ``dummy-block-tables`` is for them.
The speculator for several MTP modules would need a fix of its own; 0.27 has the class, but does not
use it.
"""

from __future__ import annotations

from ..code_edit import AddKeyword, AddParameter, EditFunction, Expect, Guard, Insert
from ..fix import Fix

_EAGLE = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"
_AUTOREGRESSIVE = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"

# A view of the persistent buffer; past the requests of the batch it is -1 in any case.
_COMPUTE_SLOTS = (
    "slot_mappings = self.block_tables.compute_slot_mappings(\n"
    "    idx_mapping, query_start_loc, positions, batch_desc.num_tokens\n"
    ")"
)
_USE_SLOTS = (
    "slot_mappings_by_layer = build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)\n"
    "attn_metadata = self._build_draft_attn_metadata(...)"
)
_NO_SLOTS = "slot_mappings.fill_(-1)"
_AGREE = "decode_batch_desc, num_tokens_across_dp = dispatch_cg_and_sync_dp(...)"


def _edits(speculator: str, decode: str) -> tuple[EditFunction, ...]:
    """The edits of a class whose ``propose`` calls the method ``decode`` for the later steps."""
    return (
        EditFunction(
            f"{speculator}.{decode}",
            (
                AddParameter("dummy_run", False),
                # Between the two: nothing is made of the slots before.
                Insert(_NO_SLOTS, before=_USE_SLOTS),
                Guard(_NO_SLOTS, "dummy_run", after=_COMPUTE_SLOTS),
            ),
        ),
        EditFunction(
            f"{speculator}.propose",
            (
                # Nothing else drafts the later tokens.
                Expect(f"{_AGREE}\nself.{decode}(...)\nreturn self.draft_tokens[:num_reqs]"),
                AddKeyword(f"self.{decode}(...)", "dummy_run", "dummy_run"),
            ),
        ),
    )


FIX = Fix(
    id="draft-dummy-slots",
    title="the draft steps of a dummy batch write no K/V to the blocks of earlier requests",
    symptom=(
        "speculative acceptance falls to exactly 0 for some conversations until the prefix cache "
        "is reset, on data-parallel ranks that were idle"
    ),
    error_patterns=(
        r"mean acceptance length: 1\.00\b",
        r"acceptance rate: 0\.0+ ?%",
        r"\b(acceptance|accepted)\b.*\b(0|zero|dropped|falls?|fell)\b",
    ),
    upstream=("PR 56734",),
    scope="V2 runner",
    releases=(
        *("0.21.0", "0.22.0", "0.22.1"),
        *("0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"),
    ),
    only_in={
        _EAGLE: ("0.21.0", "0.22.0", "0.22.1"),
        _AUTOREGRESSIVE: ("0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"),
    },
    edits={
        _EAGLE: _edits("EagleSpeculator", "multi_step_decode"),
        _AUTOREGRESSIVE: _edits("AutoRegressiveSpeculator", "_multi_step_decode"),
    },
    # The buffer of slots, who runs a dummy batch, what the graph reads, and the subclasses, none
    # of which overrides an edited method.
    witnesses=(
        "vllm/v1/worker/gpu/attn_utils.py",
        "vllm/v1/worker/gpu/block_table.py",
        "vllm/v1/worker/gpu/model_runner.py",
        "vllm/v1/worker/gpu/spec_decode/__init__.py",
        "vllm/v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py",
        "vllm/v1/worker/gpu/spec_decode/eagle/cudagraph.py",
        "vllm/v1/worker/gpu/spec_decode/gemma4/speculator.py",
        "vllm/v1/worker/gpu/spec_decode/mtp/speculator.py",
        "vllm/v1/worker/gpu/spec_decode/speculator.py",
    ),
)
