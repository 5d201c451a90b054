"""``dummy-slots``: no dummy batch of the V1 runner writes attention K/V (PR 39444).

``_dummy_run`` of 0.12.0 to 0.19.1 leaves the slot mapping as the last real step has left it, or
zero, which is the null block. A FULL graph stores K/V there; from 0.15.0 so does every dummy
batch, since its forward context has a slot mapping even without metadata. What is stored is what
a model makes of nothing, often NaN, and the prefix cache or every padded block table hands it out.

Here every slot is -1 before anything reads them. Upstream's fix fills the slots of the tokens that
the dummy batch brings; beside a busy rank the graph has more, which its 0.20.0 covers by another
change of the same line.
"""

from __future__ import annotations

from ..code_edit import EditFunction, Expect, Insert, OneOf, Step
from ..fix import Fix
from .v1_dummy_run import BUILD_METADATA, BUILD_WITHOUT_SLOTS, MODULE, NO_METADATA, QUALNAME


def _padded(*checks: Step, before: str) -> tuple[EditFunction]:
    return (
        EditFunction(
            QUALNAME,
            (*checks, Insert("pad_slots(self.input_batch.block_table)", before=before)),
            imports="from vllm_cgfix.fixes.v1_dummy_run import pad_slots",
        ),
    )


FIX = Fix(
    id="dummy-slots",
    title="no dummy batch of the V1 runner has slots to write K/V to",
    symptom=(
        "NaN or garbage after a data-parallel rank was idle: its dummy batches write K/V into the "
        "null block, or into blocks that the prefix cache hands out"
    ),
    error_patterns=(
        r"\bnan\b.*\b(output|logits?|logprob|kv|cache|token|idle)",
        r"\b(output|logits?|logprob|kv|cache|token)s?\b.*\bnan\b",
        r"\b(garbage|gibberish)\b.*\b(idle|dummy|data.parallel|dp|cached?|prefix)\b",
        r"\b(kv|cached?|null block)\b.*\b(overwrit|corrupt)",
        r"\b(overwrit|corrupt)\w*\b.*\b(kv|cached?|null block)\b",
    ),
    upstream=("PR 39444",),
    scope="V1 runner",
    releases=(
        *("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0"),
        *("0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1"),
    ),
    edits={
        MODULE: (
            OneOf(
                (
                    _padded(Expect(BUILD_WITHOUT_SLOTS), before=f"{NO_METADATA}\n{BUILD_METADATA}"),
                    # From 0.15.0 on: for the tokens that the dummy batch brings, no more.
                    _padded(
                        before=(
                            "slot_mappings_by_group, slot_mappings = self._get_slot_mappings(\n"
                            "    num_tokens_padded=num_tokens,\n"
                            "    num_reqs_padded=num_reqs_padded,\n"
                            "    num_tokens_unpadded=num_tokens_unpadded,\n"
                            "    ubatch_slices=ubatch_slices_padded,\n"
                            ")"
                        )
                    ),
                ),
            ),
        ),
    },
    witnesses=("vllm/v1/utils.py", "vllm/v1/worker/block_table.py"),
)
