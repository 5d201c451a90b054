"""Small models of every kind, as configuration files: no weights, no downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 1024

_COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
# FlashAttention 3 and FlashInfer both take heads of 128, two query heads to each of K/V.
_ATTENTION = {
    "attention_bias": False,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}
_DENSE = _COMMON | _ATTENTION

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": _DENSE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "llama": _DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "sliding": _DENSE
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 128,
    },
    "moe": _DENSE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mla": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 4,
        "kv_lora_rank": 512,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
    },
    # Attention and Mamba 2 in every layer.
    "mamba": _DENSE
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1024,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 16,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "model_type": "falcon_h1",
    },
    "gdn": _DENSE
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 256,
    },
    # The draft models of speculative decoding.
    "draft": _DENSE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    },
    "eagle": _DENSE
    | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": VOCABULARY,
        "model_type": "llama",
        "num_hidden_layers": 1,
    },
}


def write_model(name: str, folder: Path, changes: Mapping[str, Any] | None = None) -> str:
    """Write the configuration of a model, and return the folder as vLLM takes it.

    Args:
        name: a key of ``MODELS``.
        folder: where the model's own folder is made.
        changes: entries of ``config.json`` that differ.
    """
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODELS[name] | dict(changes or {}), indent=1))
    return str(place)


def write_lora(folder: Path) -> str:
    """Write a random LoRA adapter of rank 8 for the attention of ``qwen3``."""
    import torch
    from safetensors.torch import save_file

    model, rank = MODELS["qwen3"], 8
    hidden, heads = model["hidden_size"], model["num_attention_heads"] * model["head_dim"]
    kv_heads = model["num_key_value_heads"] * model["head_dim"]
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (wide, out) in {
            "q_proj": (hidden, heads),
            "k_proj": (hidden, kv_heads),
            "v_proj": (hidden, kv_heads),
            "o_proj": (heads, hidden),
        }.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, wide, generator=generator) / wide**0.5
            b = torch.randn(out, rank, generator=generator) / rank**0.5
            weights[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            weights[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
    place = folder / "lora"
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(
        json.dumps(
            {
                "bias": "none",
                "lora_alpha": 16,
                "peft_type": "LORA",
                "r": rank,
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "task_type": "CAUSAL_LM",
            }
        )
    )
    return str(place)
