"""``dummy-seq-clamp``: no dummy request of the V1 runner is longer than the model allows.

``_dummy_run`` gives each request of a mixed batch the length of the whole batch. Where a capture
size is above ``max_model_len``, which several requests together may well be, each of them claims
more blocks than its row of the block table holds: TRITON_ATTN reads past the end of the table
(illegal memory access), FLEX_ATTENTION fails on a shape. Open upstream (issue 53658, PR 53671).
"""

from __future__ import annotations

from ..code_edit import EditFunction, Insert, OneOf
from ..fix import Fix
from .v1_dummy_run import MODULE, QUALNAME


def _clamp(code: str, before: str) -> tuple[EditFunction]:
    # Before the lengths go to the device, and of the whole buffer: by then nothing else in the
    # function needs to be known by name.
    return (EditFunction(QUALNAME, (Insert(code, before=before),)),)


FIX = Fix(
    id="dummy-seq-clamp",
    title="the sequence lengths of the V1 runner's dummy batches are at most max_model_len",
    symptom=(
        "illegal memory access (TRITON_ATTN) or a shape error (FLEX_ATTENTION) while CUDA graphs "
        "are captured, where a capture size exceeds --max-model-len"
    ),
    error_patterns=(
        r"capturing cuda graphs",
        r"illegal memory access",
        r"triton_attn|unified_attention|flex_attention|block_?mask",
        r"max_model_len|max-model-len",
    ),
    upstream=("issue 53658", "PR 53671"),
    scope="V1 runner",
    releases=(
        *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0"),
        *("0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1"),
        *("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0"),
        *("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0"),
        *("0.31.0", "0.32.0", "0.33.0"),
    ),
    edits={
        MODULE: (
            OneOf(
                (
                    _clamp(
                        "np.minimum(self.seq_lens.np, self.max_model_len, out=self.seq_lens.np)",
                        before="self.seq_lens.copy_to_gpu()",
                    ),
                    # From 0.19.0 on.
                    _clamp(
                        "self.optimistic_seq_lens_cpu.clamp_(max=self.max_model_len)",
                        before=(
                            "self.seq_lens.copy_(\n"
                            "    self.optimistic_seq_lens_cpu, non_blocking=True\n"
                            ")"
                        ),
                    ),
                ),
            ),
        ),
    },
    witnesses=("vllm/v1/utils.py",),
)
