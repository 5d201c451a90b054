"""``skip-attention``: no generic attention while a PIECEWISE graph of the V2 runner is captured.

A PIECEWISE graph leaves attention out: during its capture attention runs eagerly, on a dummy
batch whose lengths no real batch can have, once in the warm-up and, from 0.27.0, again in the
capture pass. That has crashed FlashAttention 3 on Hopper (its block-table row is read past its
end) and costs capture time. PR 49494 and its follow-up skip it; 0.27.0 brought the metadata back
for operators that read it *raw* from the forward context.

Here both hold. The raw metadata stays in the :class:`ForwardContext`, which gains a field
``skip_attention``; where it is set, ``get_attention_context``, through which generic attention
gets its metadata, answers None. The capture sets it, keyed on the mode of the *descriptor*, around
each forward pass of a PIECEWISE descriptor that does not use breakable graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ..code_edit import (
    AddField,
    AddKeyword,
    AddParameter,
    EditFunction,
    Insert,
    OneOf,
    Replace,
    Wrap,
)
from ..fix import Fix
from ..process_facts import note_left_alone, release_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

ID = "skip-attention"
WARMED_BEFORE_CAPTURE = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Of the releases that need the fix, those whose worker runs ``warmup_kernels`` before it captures:
since 0.30.0, which also locks the workspace after the capture."""


def capture_scope(manager: Any, cg_mode: Any) -> AbstractContextManager[None]:
    """The scope of one forward pass that a capture makes for a descriptor.

    Contexts that are made inside inherit ``skip_attention`` from the active one, so the scope is
    a forward context too, one without metadata. It is per descriptor: a capture inside a capture
    has its own, and the outer one's comes back after it.

    Args:
        manager: the ``CudaGraphManager``, of the model or of a speculator, or a method of it.
        cg_mode: the ``CUDAGraphMode`` of the descriptor.
    """
    from vllm import forward_context as module

    manager = getattr(manager, "__self__", manager)
    active = module._forward_context
    skip = (
        cg_mode.name == "PIECEWISE"
        and hasattr(manager, "vllm_config")
        and not getattr(manager, "use_breakable_cg", False)
        and not _left_alone(manager.vllm_config)
    )
    if skip is (active is not None and active.skip_attention):
        return contextlib.nullcontext()
    if active is None:
        active = module.create_forward_context(None, manager.vllm_config)
    scope: AbstractContextManager[None] = module.override_forward_context(
        dataclasses.replace(active, skip_attention=skip)
    )
    return scope


def _left_alone(vllm_config: Any) -> bool:
    """Whether this engine needs what the skipped passes do on the side; the state says why."""
    reason = (
        _needs_metadata_in_graph(vllm_config)
        or _warms_up_in_capture(vllm_config)
        or _reserves_workspace_in_capture(vllm_config)
    )
    if reason:
        note_left_alone(ID, reason)
    return bool(reason)


_KV_UPDATE = "vllm::unified_mla_kv_cache_update"


def _needs_metadata_in_graph(vllm_config: Any) -> str | None:
    """Operators that branch on the metadata and are captured would have None baked in."""
    if _KV_UPDATE in (vllm_config.compilation_config.splitting_ops or ()):
        return None
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return f"prefill context parallelism with {_KV_UPDATE} inside the graphs"
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None):
        return f"hisparse with {_KV_UPDATE} inside the graphs"
    return None


_COMPILED_AHEAD = ("FlashAttentionImpl", "FlashInferImpl")
"""Attention whose kernels do not depend on the capture to be compiled, measured on an H200."""


def _warms_up_in_capture(vllm_config: Any) -> str | None:
    """Where nothing else does, the capture is what compiles attention kernels.

    Without FULL graphs no other pass of the start-up has a decode batch: measured on 0.20.2 with
    TRITON_ATTN, the first request would compile a kernel. And from 0.31.0 JIT warm-up can be off.
    """
    kernel = getattr(vllm_config, "kernel_config", None)
    if not getattr(kernel, "enable_jit_warmup", True):
        return "JIT warm-up is off, so that the capture is what compiles the attention kernels"
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        for layer in compilation.static_forward_context.values():
            name = type(getattr(layer, "impl", None)).__name__
            if hasattr(layer, "impl") and name not in _COMPILED_AHEAD:
                return f"there are no FULL graphs, so that the capture compiles what {name} needs"
    return None


def _reserves_workspace_in_capture(vllm_config: Any) -> str | None:
    """Attention that grows the shared workspace must do so before graphs hold its address.

    Where the worker warms its kernels up before the capture it has grown already (JIT warm-up is
    known to be on here).
    """
    if release_of(ID) in WARMED_BEFORE_CAPTURE:
        return None
    decode_context_parallel = vllm_config.parallel_config.decode_context_parallel_size > 1
    for layer in vllm_config.compilation_config.static_forward_context.values():
        implementation = getattr(layer, "impl", None)
        # MLA keeps its prefill kernels in an object of their own.
        parts = [implementation, *getattr(implementation, "__dict__", {}).values()]
        for kind in {kind for part in parts for kind in type(part).__mro__}:
            module = sys.modules.get(kind.__module__)
            if not hasattr(module, "current_workspace_manager"):
                continue
            # FlashAttention takes workspace for decode context parallelism only.
            if kind.__name__ != "FlashAttentionImpl" or decode_context_parallel:
                return f"{kind.__name__} reserves workspace in the passes of the capture"
    return None


_PASS_ON = "skip_attention"
_INHERIT = "skip_attention or (_forward_context is not None and _forward_context.skip_attention)"
_SCOPE = "from vllm_cgfix.fixes.skip_attention import capture_scope"

_LOOP_0_18 = """\
for desc in descs:
    forward_fn = create_forward_fn(desc)
    forward_fn(CUDAGraphMode.NONE)
    logger.debug(...)
    if desc.cg_mode == CUDAGraphMode.PIECEWISE:
        forward_fn(CUDAGraphMode.PIECEWISE)
    else: ...
"""
_LOOP_0_27 = """\
for desc in descs:
    forward_fn = create_forward_fn(desc, warmup=True)
    forward_fn(CUDAGraphMode.NONE)
    logger.debug(...)
    if desc.cg_mode == CUDAGraphMode.PIECEWISE and not self.use_breakable_cg:
        forward_fn(CUDAGraphMode.PIECEWISE)
    else: ...
"""


def _capture(loop: str, passes: int) -> tuple[EditFunction]:
    scope = "capture_scope(self, desc.cg_mode)"
    wrap = Wrap("forward_fn(...)", context=scope, times=passes, within=loop)
    return (EditFunction("CudaGraphManager.capture", (wrap,), imports=_SCOPE),)


FIX = Fix(
    id=ID,
    title="generic attention is skipped while the V2 runner captures PIECEWISE graphs",
    symptom=(
        "illegal memory access at the first 'Capturing CUDA graphs (PIECEWISE)' step on Hopper; "
        "the capture takes longer than it needs to"
    ),
    error_patterns=(
        r"capturing cuda graphs",
        r"flash_fwd_combine",
        r"illegal memory access",
        r"\b(slow|long)\b.*\bcapture|\bcapture\b.*\b(slow|long)",
    ),
    upstream=("PR 49494",),
    scope="V2 runner",
    releases=(
        *("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1"),
        *("0.20.2", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
        "0.33.0",
    ),
    edits={
        "vllm.forward_context": (
            AddField("ForwardContext", "skip_attention", bool, False),
            EditFunction(
                "create_forward_context",
                (
                    AddParameter("skip_attention", False),
                    AddKeyword("ForwardContext(...)", "skip_attention", _INHERIT),
                ),
            ),
            EditFunction(
                "set_forward_context",
                (
                    AddParameter("skip_attention", False),
                    AddKeyword("create_forward_context(...)", "skip_attention", _PASS_ON),
                ),
            ),
        ),
        "vllm.model_executor.layers.attention.attention": (
            EditFunction(
                "get_attention_context",
                (
                    Replace(
                        "attn_metadata",
                        by="None if forward_context.skip_attention else ...",
                        within="return attn_metadata, attn_layer, kv_cache, layer_slot_mapping",
                    ),
                ),
            ),
        ),
        "vllm.model_executor.layers.attention.mla_attention": (
            EditFunction(
                "MLAAttention.forward_impl",
                (
                    # The profiling path allocates what a prefill of the largest size would
                    # need: gigabytes, taken from the KV cache where the memory profile captures.
                    Replace(
                        "torch.empty(...)",
                        by="None if get_forward_context().skip_attention else ...",
                        within="_ = torch.empty(...)",
                    ),
                ),
            ),
        ),
        "vllm.v1.worker.gpu.cudagraph_utils": (
            OneOf(
                (
                    _capture(_LOOP_0_18, passes=3),
                    _capture(_LOOP_0_27, passes=4),
                    (
                        # 0.17: one function for the graphs of the model and of the speculator.
                        EditFunction(
                            "capture_graphs",
                            (
                                Wrap(
                                    "capture_fn(size, capture_cudagraph_mode, **capture_kwargs)",
                                    context=("capture_scope(capture_fn, capture_cudagraph_mode)"),
                                ),
                            ),
                            imports=_SCOPE,
                        ),
                    ),
                ),
            ),
        ),
        "vllm.v1.worker.gpu_worker": (
            EditFunction(
                "Worker.__init__",
                (
                    Insert(
                        "note_runner(self.use_v2_model_runner)",
                        after="self.use_v2_model_runner = ...",
                    ),
                ),
                imports="from vllm_cgfix.process_facts import note_runner",
            ),
        ),
    },
    witnesses=(
        "vllm/config/compilation.py",
        "vllm/model_executor/layers/attention/kv_transfer_utils.py",
        "vllm/v1/attention/backends/flash_attn.py",
        "vllm/v1/attention/backends/flashinfer.py",
        "vllm/v1/attention/backends/flex_attention.py",
        "vllm/v1/attention/backends/triton_attn.py",
        "vllm/v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py",
        "vllm/v1/worker/gpu/spec_decode/dflash/cudagraph.py",
        "vllm/v1/worker/gpu/spec_decode/eagle/cudagraph.py",
        "vllm/v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py",
        "vllm/v1/worker/gpu/ubatch_utils.py",
        "vllm/v1/worker/gpu/warmup.py",
        "vllm/v1/worker/gpu_ubatch_wrapper.py",
        "vllm/v1/worker/workspace.py",
    ),
)
