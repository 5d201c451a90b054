"""Run a stock vLLM, the Python sources of a CUDA wheel, on a CPU.

The reproductions run vLLM's own code. What is replaced is only the edge: which platform vLLM
believes to run on (its own ``CpuPlatform``), and compiled operators that a CUDA wheel has no CPU
version of. Call the functions in this order, in a process that has not imported vLLM yet::

    use_cpu_platform()
    config = make_config()
    with single_process_group(config):
        runner = make_v1_runner(config, "FULL_DECODE_ONLY")

One process serves one vLLM. Nothing is undone at the end: these are processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import wrapt

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64)
KV_CACHE_BYTES = 1 << 26

# The smallest model that every release accepts: the CPU attention refuses heads below 64.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}

# torch dropped these; vLLM's CPU platform of some releases calls them to log what the CPU can do.
_CPU_FEATURES = (
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
    "_is_avx2_supported",
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
)
# Operators of vLLM's compiled CPU library, with what they compute where a reproduction calls them.
_OPERATORS: dict[str, Callable[..., Any] | None] = {
    # looked up by the constructor of SiluAndMul (0.26 to 0.31), never called
    "silu_and_mul(Tensor! out, Tensor input) -> ()": None,
    # greedy sampling, 0.33
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(dim=-1),
}
_operator_library: torch.library.Library | None = None


def vllm_version() -> str:
    """The version that the importable vLLM's distribution states ("unknown" without one)."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm")
    return "unknown"


def use_cpu_platform(*, v2: bool = False) -> None:
    """Make vLLM resolve ``current_platform`` to its own ``CpuPlatform``.

    Args:
        v2: ask the configuration for the V2 model runner. Only where Triton is installed: some
            releases refuse the configuration without it.

    Raises:
        RuntimeError: vLLM has already chosen another platform in this process.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    for name in _CPU_FEATURES:
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, lambda: False)
    # Some releases resolve the platform while the vllm package itself is being imported.
    wrapt.register_post_import_hook(_choose_cpu, "vllm.platforms")
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        raise RuntimeError(f"vLLM already runs on {platform!r}")
    _define_operators()


def _choose_cpu(platforms: Any) -> None:
    platforms.resolve_current_platform_cls_qualname = lambda: "vllm.platforms.cpu.CpuPlatform"


def _define_operators() -> None:
    global _operator_library
    # A CUDA wheel's own library must come first where it loads: it defines the same operators, and
    # a second definition would stop its import.
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("vllm._C")
    _operator_library = _operator_library or torch.library.Library("_C", "FRAGMENT")
    for schema, implementation in _OPERATORS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _operator_library.define(schema)
            if implementation is not None:
                _operator_library.impl(name, implementation, "CPU")


def make_config(
    model: dict[str, Any] | None = None, *, max_num_seqs: int = 64, **engine_args: Any
) -> Any:
    """A ``VllmConfig`` for a small model, made by ``EngineArgs`` as the engine does.

    vLLM loads its general plugins on the way, so an installed vllm_cgfix is registered before any
    module of the runner is imported. Where only its sources are importable it is registered here.

    Args:
        model: the model's Hugging Face configuration (default: :data:`LLAMA`).
        max_num_seqs: as the argument of ``EngineArgs``.
        engine_args: further arguments of ``EngineArgs``.
    """
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
    }
    arguments |= engine_args
    importlib.import_module("vllm.plugins").load_general_plugins()
    _inspect_in_this_process((model or LLAMA)["architectures"][0])
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(model or LLAMA), encoding="utf-8")
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        config = arg_utils.EngineArgs(model=directory, **arguments).create_engine_config()
    # Blocks so small that a short request has several. Later than EngineArgs, whose check differs
    # from release to release: 16 alone up to 0.11, multiples of 32 since.
    config.cache_config.block_size = 32
    installed = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "cgfix" not in installed.names:
        importlib.import_module("vllm_cgfix").register()
    return config


def _inspect_in_this_process(architecture: str) -> None:
    """Spare the process that vLLM starts, with all its imports, to look at a model's class."""
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    registry.register_model(architecture, registry.models[architecture].load_model_cls())


@contextlib.contextmanager
def single_process_group(config: Any) -> Iterator[None]:
    """vLLM's configuration and its (one-rank, gloo) process groups, as a worker sets them up."""
    set_current_vllm_config = importlib.import_module("vllm.config").set_current_vllm_config
    state = importlib.import_module("vllm.distributed.parallel_state")
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(config):
        state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{directory}/store",
            backend="gloo",
        )
        try:
            state.ensure_model_parallel_initialized(1, 1)
            replace_kernels()
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def replace_kernels() -> None:
    """Replace what a metadata builder or a capture would call in vLLM's compiled CPU library."""
    operators = importlib.import_module("vllm._custom_ops")
    if hasattr(operators, "cpu_attn_get_scheduler_metadata"):
        vars(operators)["cpu_attn_get_scheduler_metadata"] = lambda *_, **__: torch.zeros(1)
    for name in ("vllm.compilation.breakable_cudagraph", "vllm.compilation.cuda_graph"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, "weak_ref_tensors"):
                vars(module)["weak_ref_tensors"] = lambda tensors: tensors
    table_type = importlib.import_module("vllm.v1.worker.block_table").BlockTable
    # numpy code up to 0.18; since then a Triton kernel, which the CPU has not.
    if "query_start_loc" in inspect.signature(table_type.compute_slot_mapping).parameters:
        table_type.compute_slot_mapping = _compute_slot_mapping


def _compute_slot_mapping(
    table: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """``BlockTable.compute_slot_mapping`` without context parallelism: past the tokens, -1."""
    requests = torch.arange(num_reqs).repeat_interleave(query_start_loc[: num_reqs + 1].diff())
    blocks = device_tensor(table.block_table)[requests, positions // table.block_size]
    slots = device_tensor(table.slot_mapping)
    slots.fill_(-1)
    slots[: len(positions)] = blocks * table.block_size + positions % table.block_size


def device_tensor(buffer: Any) -> torch.Tensor:
    """The device side of a ``CpuGpuBuffer``; a bare tensor, as some releases keep, is that side."""
    tensor: torch.Tensor = buffer if isinstance(buffer, torch.Tensor) else buffer.gpu
    return tensor


def cudagraph_mode(name: str) -> Any:
    """The member of this release's ``CUDAGraphMode`` called ``name``.

    Raises:
        KeyError: this release has no such mode.
    """
    return importlib.import_module("vllm.config.compilation").CUDAGraphMode[name]


def set_cudagraph_mode(config: Any, mode: str, sizes: Sequence[int] = CAPTURE_SIZES) -> None:
    """Give an eager configuration the graph mode and capture sizes of a GPU's.

    ``EngineArgs`` on a CPU platform always ends at NONE, so this comes after it.
    """
    compilation = config.compilation_config
    compilation.cudagraph_mode = cudagraph_mode(mode)
    compilation.cudagraph_capture_sizes = sorted(sizes)
    # The name of the largest size, and who derives the table of padded sizes, changed twice.
    for name in ("max_cudagraph_capture_size", "max_capture_size"):
        if name in {field.name for field in dataclasses.fields(compilation)}:
            setattr(compilation, name, max(sizes))
    for name in ("init_with_cudagraph_sizes", "compute_bs_to_padded_graph_size"):
        if hasattr(compilation, name):
            arguments = [list(sizes)] if name == "init_with_cudagraph_sizes" else []
            getattr(compilation, name)(*arguments)


def kv_cache_config(config: Any, kv_cache_spec: dict[str, Any]) -> Any:
    """The ``KVCacheConfig`` that the engine core would plan for one worker's layers."""
    cache = config.cache_config
    if hasattr(cache, "kv_cache_layout"):
        cache.kv_cache_layout = "LBNHC"  # the engine core resolves it from 0.32 on
    try:
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        planning = importlib.import_module("vllm.v1.core.kv_cache_utils")
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(config, [kv_cache_spec])
        (planned,) = planning.get_kv_cache_configs(
            config, [kv_cache_spec], [KV_CACHE_BYTES], groups
        )
    elif hasattr(planning, "get_kv_cache_configs"):
        (planned,) = planning.get_kv_cache_configs(config, [kv_cache_spec], [KV_CACHE_BYTES])
    else:
        planned = planning.get_kv_cache_config(config, kv_cache_spec, KV_CACHE_BYTES)
    if hasattr(planned, "kv_cache_layout"):
        planned.kv_cache_layout = cache.kv_cache_layout
    return planned


def make_v1_runner(
    config: Any,
    mode: str,
    sizes: Sequence[int] = CAPTURE_SIZES,
    *,
    uniform_decode_query_len: int = 1,
    kv_cache_groups: int = 1,
) -> Any:
    """A V1 ``CPUModelRunner`` with model, KV cache and a dispatcher that answers as on a GPU.

    Args:
        config: a configuration of its own: layers are registered in it, once.
        mode: name of a ``CUDAGraphMode``: "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE".
        sizes: the capture sizes.
        uniform_decode_query_len: tokens of one decode request; above 1 for speculative decoding.
        kv_cache_groups: 1, or 2 for each of the two layers with blocks of its own.
    """
    runner_module = importlib.import_module("vllm.v1.worker.cpu_model_runner")
    runner = runner_module.CPUModelRunner(config, torch.device("cpu"))
    runner.load_model()
    planned = kv_cache_config(config, runner.get_kv_cache_spec())
    if kv_cache_groups > 1:
        planned.kv_cache_groups = [
            dataclasses.replace(group, layer_names=[layer])
            for group in planned.kv_cache_groups
            for layer in group.layer_names
        ]
        # The CPU runner of 0.11.0 refuses two groups here; a GPU's does not.
        base = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        runner._may_reorder_batch = types.MethodType(base._may_reorder_batch, runner)
    runner.initialize_kv_cache(planned)
    separate_device_buffers(runner)
    dispatch_to_full_graphs(runner, mode, sizes, uniform_decode_query_len)
    return runner


def dispatch_to_full_graphs(
    runner: Any, mode: str, sizes: Sequence[int], uniform_decode_query_len: int
) -> None:
    """Give the runner a real ``CudagraphDispatcher`` with the keys of ``mode``."""
    config = runner.vllm_config
    # The dispatcher's constructor insists on a piecewise compilation for a piecewise mode; its keys
    # do not depend on one.
    set_cudagraph_mode(config, "FULL", sizes)
    dispatcher_type = importlib.import_module("vllm.v1.cudagraph_dispatcher").CudagraphDispatcher
    dispatcher = dispatcher_type(config)
    dispatcher.uniform_decode_query_len = uniform_decode_query_len
    set_cudagraph_mode(config, mode, sizes)
    dispatcher.initialize_cudagraph_keys(cudagraph_mode(mode), uniform_decode_query_len)
    runner.cudagraph_dispatcher = dispatcher
    runner.cudagraph_batch_sizes = sorted(sizes)  # read by real steps up to 0.11.0
    runner.uniform_decode_query_len = uniform_decode_query_len


def separate_device_buffers(runner: Any) -> None:
    """Undo what ``CPUModelRunner`` does to each ``CpuGpuBuffer``: ``gpu`` is ``cpu`` there.

    With storage of its own on each side ``copy_to_gpu`` copies, and what the graph would read
    (``gpu``) can differ from what the host wrote (``cpu``), as on a GPU.
    """
    buffer_type = importlib.import_module("vllm.v1.utils").CpuGpuBuffer
    for owner in (runner, *runner.input_batch.block_table.block_tables):
        for name, value in list(vars(owner).items()):
            if isinstance(value, buffer_type):
                value.gpu = value.cpu.clone()
            elif isinstance(value, torch.Tensor) and name + "_cpu" in vars(owner):
                setattr(owner, name, getattr(owner, name + "_cpu").clone())
