"""Each kind of attention layer, with and without ``skip_attention``; run by a test, in a release.

The layers, their operator and the forward context are vLLM's; what stands in is the kernel.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

import vllm_cgfix
from vllm_cgfix.verify import cpu

KINDS = ("plain", "sliding window", "KV sharing", "encoder-only", "cross")


def make_layers(layers: Any, cache_config: Any) -> dict[str, Any]:
    """One layer of each kind, by its name."""
    shape = {
        **{"num_heads": 4, "head_size": 64, "scale": 1.0, "num_kv_heads": 4},
        "cache_config": cache_config,
    }
    make = layers.Attention
    made = [
        make(**shape, prefix="0.plain"),
        make(**shape, prefix="1.sliding", per_layer_sliding_window=32),
        make(**shape, prefix="2.shared", kv_sharing_target_layer_name="0.plain"),
        layers.EncoderOnlyAttention(**shape, prefix="3.encoder"),
        layers.CrossAttention(**shape, prefix="4.cross"),
    ]
    return dict(zip(KINDS, made, strict=True))


def main() -> None:
    """Print each kind and what its kernel is given: metadata, then with the flag None."""
    cpu.use_cpu_platform()
    config = cpu.make_config()
    contexts = importlib.import_module("vllm.forward_context")
    package = importlib.import_module("vllm.model_executor.layers.attention")
    operators = importlib.import_module("vllm.model_executor.layers.attention.attention")
    for name in ("gpu_worker", "gpu.cudagraph_utils"):
        importlib.import_module(f"vllm.v1.worker.{name}")
    given: list[Any] = []

    def kernel(*arguments: Any, **_: Any) -> Any:
        given.append(arguments[5])
        return arguments[1]

    with cpu.single_process_group(config):
        for kind, layer in make_layers(package, config.cache_config).items():
            layer.impl.forward = kernel
            metadata, part = SimpleNamespace(), torch.zeros(3, 4, 64)
            raw = {layer.layer_name: metadata}
            for skip in (False, True):
                given.clear()
                with contexts.set_forward_context(raw, config, num_tokens=3, skip_attention=skip):
                    operators.unified_attention_with_output(
                        part, part, part, part.clone(), layer.layer_name
                    )
                    assert contexts.get_forward_context().attn_metadata is raw
                assert given == [None if skip else metadata], (kind, skip, given)
            print(f"{kind}: skipped")
    states = {status.fix.id: status.state.value for status in vllm_cgfix.status()}
    assert states["skip-attention"] == "applied", states


if __name__ == "__main__":
    main()
