"""What each metadata builder of 0.11.x plans for an idle batch beside a busy rank.

``python builders.py [PADDED_TO]`` prints a JSON object: for each builder what it plans when the
graph of ``PADDED_TO`` tokens is captured ("captured") and when an idle batch replays it ("idle":
null where the runner builds no metadata), or why it cannot be made on this machine ("error").

The runner, its ``_dummy_run`` and the builders are vLLM's. Replaced, at the edge: the
``flashinfer`` package (its wrappers note what they are given), FA3's scheduler, and Triton kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch

from vllm_cgfix.verify import cpu
from vllm_cgfix.verify.v1_runner import LiveRequest, Probe

BACKENDS = "vllm.v1.attention.backends"
# builder: (module below BACKENDS, kind of its KV cache)
BUILDERS = {
    "FlashAttentionMetadataBuilder": ("flash_attn", "attention"),
    "FlashInferMetadataBuilder": ("flashinfer", "attention"),
    "TritonAttentionMetadataBuilder": ("triton_attn", "attention"),
    "Mamba1AttentionMetadataBuilder": ("mamba1_attn", "mamba1"),
    "Mamba2AttentionMetadataBuilder": ("mamba2_attn", "mamba2"),
    "ShortConvAttentionMetadataBuilder": ("short_conv_attn", "short_conv"),
    "LinearAttentionMetadataBuilder": ("linear_attn", "linear_attention"),
    "GDNAttentionMetadataBuilder": ("gdn_attn", "gdn_attention"),
    "MLACommonMetadataBuilder": ("mla.common", "attention"),
    "FlashMLAMetadataBuilder": ("mla.flashmla", "attention"),
    "CutlassMLAMetadataBuilder": ("mla.cutlass_mla", "attention"),
    "FlashInferMLAMetadataBuilder": ("mla.flashinfer_mla", "attention"),
    "FlashAttnMLAMetadataBuilder": ("mla.flashattn_mla", "attention"),
}
# What builders of other architectures than Llama read from the model's configuration.
ARCHITECTURE = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mamba_chunk_size": 64,
    "head_dim": 576,
}


def observe_builders(padded_to: int = 8) -> dict[str, dict[str, Any]]:
    """Feed every builder with the runner's own ``CommonAttentionMetadata``.

    Args:
        padded_to: tokens of the busy rank, a capture size.
    """
    cpu.use_cpu_platform()
    config = cpu.make_config()
    with cpu.single_process_group(config):
        runner = cpu.make_v1_runner(config, "FULL_DECODE_ONLY")
        captured, idle = _common_metadata(runner, padded_to)
        config.cache_config.enable_prefix_caching = False  # as for most models with a state
        for name, value in ARCHITECTURE.items():
            setattr(config.model_config.hf_text_config, name, value)
        results: dict[str, dict[str, Any]] = {}
        for name, (module, kind) in BUILDERS.items():
            try:
                builder = _make_builder(name, module, kind, runner)
            except Exception as error:  # a builder that this machine cannot make is a result
                results[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            results[name] = {
                "captured": _plan(builder, captured),
                "idle": None if idle is None else _plan(builder, idle),
            }
    return results


def _common_metadata(runner: Any, padded_to: int) -> tuple[Any, Any]:
    """What the runner hands to a builder: for the capture, and for the idle batch (or None)."""
    probe = Probe(runner)
    builder = runner.attn_groups[0][0].get_metadata_builder()
    seen: list[Any] = []
    original = builder.build_for_cudagraph_capture

    def listening(common: Any) -> Any:
        seen.append(_snapshot(common))
        return original(common)

    builder.build_for_cudagraph_capture = listening
    mode = cpu.cudagraph_mode("FULL")
    probe.dummy_run(padded_to, cudagraph_runtime_mode=mode, uniform_decode=True)
    request = LiveRequest(probe, "live")
    request.prefill()
    with probe.busy_rank(padded_to):
        probe.dummy_run(1, uniform_decode=True)
    captured, *idle = seen
    return captured, idle[0] if idle else None


def _snapshot(common: Any) -> Any:
    """The metadata with tensors of its own: the runner's buffers are written again."""
    tensors = {
        field.name: getattr(common, field.name).clone()
        for field in dataclasses.fields(common)
        if isinstance(getattr(common, field.name), torch.Tensor)
    }
    return dataclasses.replace(common, **tensors)


def _make_builder(name: str, module_name: str, kind: str, runner: Any) -> Any:
    sys.modules.update(_flashinfer())
    with _cuda_device():
        module = importlib.import_module(f"{BACKENDS}.{module_name}")
    if module_name == "flash_attn":
        _replace_flash_attention_kernels(module)
    if module_name == "flashinfer":
        _replace_flashinfer_kernels(module)
    if module_name == "mla.flashmla":
        # FlashMLA plans for each request a number of splits.
        module.get_mla_metadata = lambda seq_lens, *_, **__: (
            torch.zeros(1, 8, dtype=torch.int32),
            torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        )
    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if kind != "attention":
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        spec = interface.MambaSpec(
            block_size=spec.block_size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_type=kind
        )
    layers = runner.kv_cache_config.kv_cache_groups[0].layer_names
    with _cuda_device():
        return getattr(module, name)(spec, layers, runner.vllm_config, torch.device("cpu"))


@contextlib.contextmanager
def _cuda_device() -> Iterator[None]:
    """Some modules and builders look at the GPU and allocate a workspace: here on the host."""

    def on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return allocate

    hopper = types.SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(torch, "empty", on_host(torch.empty)),
        mock.patch.object(torch, "zeros", on_host(torch.zeros)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=hopper),
    ):
        yield


def _replace_flash_attention_kernels(module: Any) -> None:
    """As on Hopper: FA3 plans ahead, and its plan depends on the number of requests."""
    module.get_flash_attn_version = lambda: 3
    module._get_sliding_window_configs = lambda config: {(-1, -1)}
    module.get_scheduler_metadata = lambda **given: torch.full(
        (given["batch_size"] + 1,), given["batch_size"], dtype=torch.int32
    )


def _plan(builder: Any, common: Any) -> dict[str, Any]:
    plans = _Wrapper.plans = []
    metadata = builder.build_for_cudagraph_capture(_snapshot(common))
    summary = _summary(metadata)
    assert isinstance(summary, dict)
    return summary | ({"wrapper_plans": plans} if plans else {})


def _summary(value: Any) -> Any:
    """Numbers as they are, tensors as shape and values, dataclasses field by field."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "values": value.flatten()[:64].tolist()}
    if dataclasses.is_dataclass(value):
        return {f.name: _summary(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, _Wrapper):
        return {"batch_size": value.batch_size}
    return value if isinstance(value, int | float | str | dict | None) else str(value)


class _Wrapper:
    """Stands for a wrapper of flashinfer: notes each plan."""

    plans: ClassVar[list[dict[str, Any]]] = []

    def __init__(
        self,
        *_: Any,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        **__: Any,
    ) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._float_workspace_buffer = self._int_workspace_buffer = torch.empty(0)
        self._pin_memory_int_workspace_buffer = torch.empty(0)
        last = paged_kv_last_page_len_buffer
        self.batch_size = self._fixed_batch_size = 0 if last is None else len(last)
        self._cached_module = types.SimpleNamespace(plan=self._plan_again)

    def plan(self, indptr: torch.Tensor, *_: Any, **__: Any) -> None:
        """The first plan: ``indptr`` has one entry more than the batch has requests."""
        self.plans.append({"batch_size": len(indptr) - 1, "kv_indptr": indptr.tolist()})

    def _plan_again(self, *arguments: Any) -> None:
        # vLLM's fast_plan_decode: the 5th argument is the pages' indptr, the 8th the batch size.
        self.plans.append({"batch_size": arguments[7], "kv_indptr": arguments[4].tolist()})


def _flashinfer() -> dict[str, types.ModuleType]:
    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made).update(content)
        return made

    def page_range(size: int, _: str) -> torch.Tensor:
        return torch.arange(size)

    wrappers = {
        name: type(name, (_Wrapper,), {})
        for name in (
            "BatchDecodeWithPagedKVCacheWrapper",
            "BatchPrefillWithPagedKVCacheWrapper",
            "BatchPrefillWithRaggedKVCacheWrapper",
            "MultiLevelCascadeAttentionWrapper",
        )
    }
    kernel = mock.Mock(name="a kernel of flashinfer")
    return {
        "flashinfer": module("flashinfer", **wrappers),
        "flashinfer.decode": module(
            "flashinfer.decode",
            _get_range_buf=page_range,
            trtllm_batch_decode_with_kv_cache=kernel,
            trtllm_batch_decode_with_kv_cache_mla=kernel,
        ),
        "flashinfer.prefill": module(
            "flashinfer.prefill", trtllm_batch_context_with_kv_cache=kernel
        ),
        "flashinfer.utils": module("flashinfer.utils", FP4Tensor=torch.Tensor),
    }


def _replace_flashinfer_kernels(module: Any) -> None:
    utils = importlib.import_module(f"{BACKENDS}.utils")
    parameters = utils.PerLayerParameters(window_left=-1, logits_soft_cap=None, sm_scale=0.125)
    # The runner's layers have the CPU's attention, which has no such parameters.
    module.get_per_layer_parameters = lambda config, layers, impl: dict.fromkeys(layers, parameters)
    module._copy_page_indices_kernel = mock.MagicMock(name="_copy_page_indices_kernel")


if __name__ == "__main__":
    print(json.dumps(observe_builders(*map(int, sys.argv[1:]))))
