"""``skip-attention`` as changes of the text of the functions that it edits."""

from __future__ import annotations

from tests.releases.text import (
    ExtendCall,
    InsertAtTop,
    InsertInLine,
    InsertText,
    Operation,
    WrapLines,
)

_0_17 = ("0.17.0", "0.17.1")
_0_18 = ("0.18.0", "0.18.1")
_0_19 = ("0.19.0", "0.19.1")
_0_20 = ("0.20.0", "0.20.1", "0.20.2")
_0_27 = ("0.27.0", "0.27.1")
_0_28_TO_0_30 = ("0.28.0", "0.29.0", "0.30.0")
_FROM_0_31 = ("0.31.0", "0.32.0", "0.33.0")


def _create(parameters: int, call: tuple[int, int]) -> tuple[Operation, ...]:
    """The end of the parameters, and the call of the constructor."""
    inherited = "_forward_context is not None and _forward_context.skip_attention"
    return (
        InsertText("skip_attention=False,", before=parameters),
        ExtendCall(*call, "ForwardContext", f"skip_attention=skip_attention or ({inherited})"),
    )


def _set(parameters: int, call: tuple[int, int]) -> tuple[Operation, ...]:
    """The end of the parameters, and the call of ``create_forward_context``."""
    return (
        InsertText("skip_attention=False,", before=parameters),
        ExtendCall(*call, "create_forward_context", "skip_attention=skip_attention"),
    )


def _get(answer: int) -> tuple[Operation, ...]:
    """The line that returns the answer."""
    skipped = "None if forward_context.skip_attention else "
    return (InsertInLine(answer, after="return ", text=skipped),)


def _forward_impl(profile: int) -> tuple[Operation, ...]:
    """The allocation of the profiling path."""
    skipped = "None if get_forward_context().skip_attention else "
    return (InsertInLine(profile, after="_ = ", text=skipped),)


_SCOPE = "from vllm_cgfix.fixes.skip_attention import capture_scope"


def _capture(loop: int, *passes: int) -> tuple[Operation, ...]:
    """The line of the loop over descriptors, and those of the forward passes."""
    header = "with capture_scope(self, desc.cg_mode):"
    wraps = (WrapLines(line, line, header, within=loop) for line in passes)
    return (InsertAtTop(_SCOPE), *wraps)


def _capture_graphs(line: int) -> tuple[Operation, ...]:
    """The line of the call, which makes both passes."""
    header = "with capture_scope(capture_fn, capture_cudagraph_mode):"
    return (InsertAtTop(_SCOPE), WrapLines(line, line, header))


def _worker(choice: int) -> tuple[Operation, ...]:
    """The line that sets the runner."""
    return (
        InsertAtTop("from vllm_cgfix.process_facts import note_runner"),
        InsertText("note_runner(self.use_v2_model_runner)", after=choice),
    )


PATCHES = {
    "create_forward_context": {
        (*_0_17, *_0_18): _create(12, (18, 30)),
        (*_0_19, *_0_20): _create(11, (17, 28)),
        (*_0_27, *_0_28_TO_0_30, *_FROM_0_31): _create(12, (18, 30)),
    },
    "set_forward_context": {
        (*_0_17, *_0_18): _set(12, (62, 73)),
        _0_19: _set(11, (60, 70)),
        _0_20: _set(11, (60, 70)),
        (*_0_27, *_0_28_TO_0_30, "0.31.0", "0.32.0"): _set(12, (70, 81)),
        ("0.33.0",): _set(12, (68, 79)),
    },
    "get_attention_context": {
        (*_0_17, *_0_18): _get(34),
        _0_19: _get(34),
        (*_0_20, *_0_27, *_0_28_TO_0_30): _get(41),
        _FROM_0_31: _get(42),
    },
    "MLAAttention.forward_impl": {
        _0_17: _forward_impl(23),
        (*_0_18, *_0_19): _forward_impl(23),
        _0_20: _forward_impl(39),
        _0_27: _forward_impl(40),
        ("0.28.0",): _forward_impl(40),
        ("0.29.0",): _forward_impl(40),
        ("0.30.0",): _forward_impl(40),
        ("0.31.0", "0.32.0"): _forward_impl(40),
        ("0.33.0",): _forward_impl(40),
    },
    "CudaGraphManager.capture": {
        (*_0_18, *_0_19, *_0_20): _capture(25, 30, 37, 47),
        (*_0_27, "0.28.0"): _capture(26, 31, 41, 46, 60),
        ("0.29.0",): _capture(34, 39, 49, 54, 73),
        ("0.30.0",): _capture(37, 42, 54, 59, 78),
        ("0.31.0",): _capture(39, 44, 56, 61, 80),
        ("0.32.0", "0.33.0"): _capture(39, 44, 56, 61, 79),
    },
    "capture_graphs": {_0_17: _capture_graphs(16)},
    "Worker.__init__": {
        (*_0_17, *_0_18, *_0_19, *_0_20): _worker(48),
        _0_27: _worker(46),
        ("0.28.0",): _worker(43),
        ("0.29.0", "0.30.0"): _worker(43),
        ("0.31.0", "0.32.0"): _worker(45),
        ("0.33.0",): _worker(9),
    },
}
