"""``dummy-sync``: a dummy batch of the V1 runner waits before it writes pinned buffers (PR 34866).

With async scheduling the copies of the step before may still be reading ``seq_lens`` and
``query_start_loc`` on the host; ``execute_model`` waits for them in ``synchronize_input_prep``.
``_dummy_run`` of 0.12.0 to 0.16.0 writes the same buffers and does not, so that a kernel can see
lengths of two batches at once.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Expect, OneOf, Step, Wrap
from ..fix import Fix
from .v1_dummy_run import BUILD_METADATA, BUILD_WITHOUT_SLOTS, MODULE, NO_METADATA, QUALNAME


def _synchronized(*checks: Step, after: str) -> tuple[EditFunction]:
    context = "self.synchronize_input_prep()"
    return (EditFunction(QUALNAME, (*checks, Wrap(BUILD_METADATA, context=context, after=after))),)


FIX = Fix(
    id="dummy-sync",
    title="a dummy batch of the V1 runner takes part in the protocol of the pinned input buffers",
    symptom=(
        "illegal memory access with data or expert parallelism, FULL graphs and async scheduling: "
        "a dummy batch overwrites input buffers that are still being copied"
    ),
    error_patterns=(
        r"illegal memory access",
        r"cudaErrorIllegalAddress",
        r"prepare_inputs_event|synchronize_input_prep",
    ),
    upstream=("PR 34866",),
    scope="V1 runner",
    releases=("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0"),
    edits={
        MODULE: (
            OneOf(
                # Right after the one or the other, and so not yet inside of it.
                (
                    _synchronized(Expect(BUILD_WITHOUT_SLOTS), after=NO_METADATA),
                    # From 0.15.0 on.
                    _synchronized(
                        after="slot_mappings_by_group, slot_mappings = self._get_slot_mappings(...)"
                    ),
                ),
            ),
        ),
    },
    witnesses=("vllm/v1/utils.py",),
)
