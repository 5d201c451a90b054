"""Which blocks of a KV cache changed, and which of them somebody holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """One layer's cache with its blocks first, as bytes.

    Args:
        cache: the layer's tensor; one of its dimensions is the blocks (FLASH_ATTN has K and V
            before it, FLASHINFER after it).
        num_blocks: how many blocks there are. It must be a number that no other dimension has.

    Returns:
        ``[num_blocks, bytes of a block]``, uint8.

    Raises:
        ValueError: not exactly one dimension is ``num_blocks``.
    """
    dimensions = [i for i, size in enumerate(cache.shape) if size == num_blocks]
    if len(dimensions) != 1:
        raise ValueError(f"which of {tuple(cache.shape)} are the {num_blocks} blocks?")
    # Bytes, not numbers: a NaN differs from itself, and 0.0 is equal to -0.0.
    moved = cache.movedim(dimensions[0], 0).contiguous()
    return moved.view(torch.uint8).reshape(num_blocks, -1)


def snapshot(caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of every layer's cache, complete when this returns."""
    copies = [cache.clone() for cache in caches]
    if any(copy.is_cuda for copy in copies):
        torch.cuda.synchronize()
    return copies


def changed(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], num_blocks: int
) -> dict[int, list[int]]:
    """The blocks in which any byte differs: block id to the indices of the layers."""
    found: dict[int, list[int]] = {}
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        differs = (by_block(old, num_blocks) != by_block(new, num_blocks)).any(dim=1)
        for block in differs.nonzero().flatten().tolist():
            found.setdefault(block, []).append(layer)
    return dict(sorted(found.items()))


def holders(blocks: Iterable[Any]) -> dict[int, str]:
    """Who holds each block of vLLM's ``BlockPool``: block id to ``request`` or ``prefix cache``.

    Args:
        blocks: ``BlockPool.blocks``. The null block is nobody's.
    """
    held = {}
    for block in blocks:
        if block.is_null:
            continue
        if block.ref_cnt > 0:
            held[block.block_id] = "request"
        elif block.block_hash is not None:
            held[block.block_id] = "prefix cache"
    return held


def held_changes(found: Mapping[int, list[int]], held: Mapping[int, str]) -> dict[str, str]:
    """The changed blocks that somebody holds, for a report: block to holder and layers."""
    return {
        str(block): f"{held[block]}, layers {','.join(map(str, layers))}"
        for block, layers in found.items()
        if block in held
    }
