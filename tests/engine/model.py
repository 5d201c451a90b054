"""A model of 0.3 million parameters: small enough to start at once, and sensitive to attention.

Its weights are random but not small: with the near-zero ones of ``load_format="dummy"`` the next
token hardly depends on what attention reads, and equal tokens would prove nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from vllm_cgfix.verify.cpu import LLAMA

# vLLM takes it for a mixture of experts, whose data-parallel engines march in step. It has none:
# vLLM's CPU communicator cannot exchange tokens between experts.
IN_STEP = {**LLAMA, "num_experts": 4}


def write(folder: Path, config: dict[str, Any] = LLAMA) -> None:
    """Write a model's configuration and weights, and a tokenizer of words ``w0``, ``w1``, ..."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {f"w{token}": token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(config: dict[str, Any]) -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(0)
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    inner, words = config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (words, hidden),
        "lm_head": (words, hidden),
        "model.norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj": (heads, hidden) for part in "qkv"}
        shapes |= {
            f"{name}.self_attn.o_proj": (hidden, heads),
            f"{name}.mlp.gate_proj": (inner, hidden),
            f"{name}.mlp.up_proj": (inner, hidden),
            f"{name}.mlp.down_proj": (hidden, inner),
            f"{name}.input_layernorm": (hidden,),
            f"{name}.post_attention_layernorm": (hidden,),
        }
    return {
        f"{name}.weight": (
            numpy.ones(shape) if len(shape) == 1 else random.normal(0, 2 / shape[1] ** 0.5, shape)
        ).astype(numpy.float32)
        for name, shape in shapes.items()
    }
