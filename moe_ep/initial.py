"""Initial values that depend on (seed, layer, expert) alone, so that every sharding starts from the same model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .errors import InputError

LAYER_BITS, EXPERT_BITS = 12, 20
SHARED_EXPERT_ID = 2**EXPERT_BITS - 1  # stands for a layer's shared experts


def generator_for(seed: int, layer_index: int, expert_id: int) -> torch.Generator:
    """A CPU generator that no other (layer, expert) of the model shares.

    torch's CPU generator uses 32 bits of its seed, so a hash of the triple would meet a collision among the experts of
    a large model. The pair (layer, expert) is mixed by a bijection of 32 bits instead: MurmurHash3's finalizer
    (Austin Appleby, public domain).

    Raises:
        InputError: a layer or expert that does not fit 12 and 20 bits.
    """
    if not (0 <= layer_index < 2**LAYER_BITS and 0 <= expert_id < 2**EXPERT_BITS):
        raise InputError(
            f"layer {layer_index}, expert {expert_id} have no initial values of their own: layers go up to "
            f"{2**LAYER_BITS - 1}, experts up to {2**EXPERT_BITS - 1}; number both from 0"
        )
    salt = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")
    key = (layer_index << EXPERT_BITS | expert_id) ^ salt
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        key = (key ^ key >> shift) * factor % 2**32
    return torch.Generator().manual_seed(key ^ key >> 16)


def normal_(target: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill `target` with float32 normal(0, std) values drawn on the CPU and cast; a meta tensor is left alone."""
    if not target.is_meta:
        with torch.no_grad():
            target.copy_(
                torch.empty(target.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
            )
