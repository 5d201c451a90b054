"""``dispatch-order`` as changes of the text of ``_dummy_run``."""

from __future__ import annotations

from tests.releases.text import InsertText, MoveLines, Operation, ReplaceNames, WrapLines

_NAMES = (
    *("num_tokens", "num_reqs", "max_query_len", "num_scheduled_tokens"),
    *("seq_lens", "ubatch_slices"),
)
_DUMMY_BATCH = """\
from vllm_cgfix.fixes.dispatch_order import DummyBatch, prepare_dummy_batch
dummy_batch = prepare_dummy_batch(
    self,
    batch_descriptor if cudagraph_runtime_mode == CUDAGraphMode.FULL else None,
    DummyBatch(
        num_tokens, num_reqs, max_query_len, num_scheduled_tokens, seq_lens, ubatch_slices
    ),
)
ubatch_slices = dummy_batch.ubatch_slices
"""
_QUERY_STARTS = "self.query_start_loc.np[dummy_batch.num_reqs + 1 :] = cum_num_tokens[-1]"
_MOVED_READS = (
    *("num_tokens_after_padding", "uniform_decode", "is_profile", "cudagraph_runtime_mode"),
    "activate_lora",
)


def _dummy_run(
    *, metadata: int, build: tuple[int, int], seq_lens: int, query_starts: int, ask: tuple[int, int]
) -> tuple[Operation, ...]:
    """The patch, by the lines of the function in a release.

    Args:
        metadata: the line that sets the metadata to None.
        build: the ``if`` that builds it.
        seq_lens: the first line in it that a wider dummy batch must change.
        query_starts: the line that writes the query starts.
        ask: the question to the dispatcher and the ``if`` that takes its answer.
    """
    return (
        MoveLines(*ask, before=metadata, reads=_MOVED_READS),
        ReplaceNames(seq_lens, build[1], _NAMES, "dummy_batch.{}"),
        InsertText(_DUMMY_BATCH, before=seq_lens),
        InsertText(_QUERY_STARTS, after=query_starts),
        WrapLines(*build, "with self.synchronize_input_prep():"),
    )


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.11.0",): _dummy_run(
            metadata=123, build=(127, 186), seq_lens=139, query_starts=145, ask=(226, 238)
        ),
        ("0.11.1", "0.11.2"): _dummy_run(
            metadata=111, build=(115, 137), seq_lens=123, query_starts=128, ask=(186, 208)
        ),
    }
}
