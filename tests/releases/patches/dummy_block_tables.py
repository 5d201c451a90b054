"""``dummy-block-tables`` as changes of the text of the functions that it edits."""

from __future__ import annotations

from tests.releases.text import IfThere, InsertAtTop, InsertInLine, InsertText, Operation

_TOP = InsertAtTop("from vllm_cgfix.fixes.v1_dummy_run import null_block_tables")
_NULL = "null_block_tables(self.input_batch.block_table, num_reqs_padded)"


def _before(lengths: int) -> tuple[Operation, ...]:
    """The line that adds up the query lengths."""
    return (_TOP, InsertText(_NULL, before=lengths))


def _after(commit: int) -> tuple[Operation, ...]:
    """The line that copies the host's rows."""
    return (_TOP, InsertText(_NULL, after=commit))


def _as_for_capture(capture: int, starts: int) -> Operation:
    """The argument that says what the metadata is built for, and the query starts of padding.

    Without the latter, the text is that of 0.22.1.
    """
    full = " or cudagraph_runtime_mode == CUDAGraphMode.FULL"
    there = InsertInLine(capture, after="for_cudagraph_capture=is_graph_capturing", text=full)
    return IfThere(starts, there)


def _rows(answer: int) -> tuple[Operation, ...]:
    """The line that returns the rows."""
    return (InsertInLine(answer, after="block_table[:num_reqs]", text=".zero_()"),)


PATCHES = {
    "GPUModelRunner._dummy_run": {
        ("0.12.0",): _before(145),
        ("0.13.0",): _before(148),
        ("0.14.0", "0.14.1"): _before(162),
        ("0.15.0", "0.15.1"): _before(170),
        ("0.16.0",): _before(174),
        ("0.17.0", "0.17.1"): _before(179),
        ("0.18.0", "0.18.1"): _before(185),
        ("0.19.0", "0.19.1"): _after(198),
        ("0.20.0", "0.20.1", "0.20.2"): _after(204),
        ("0.21.0", "0.22.0", "0.22.1"): _after(204),
        ("0.23.0", "0.24.0", "0.25.0", "0.25.1"): (*_after(207), _as_for_capture(216, starts=198)),
        ("0.26.0",): (
            _TOP,
            InsertText(f"if dcp_dummy_context_len == 0:\n    {_NULL}", after=235),
            _as_for_capture(244, starts=215),
        ),
    },
    "BlockTables.get_dummy_block_tables": {
        (*("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0"),): _rows(2),
        (
            *("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1"),
            *("0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1"),
            "0.26.0",
        ): _rows(6),
    },
}
