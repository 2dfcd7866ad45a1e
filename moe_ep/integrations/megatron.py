"""Megatron-Core (0.16.1 on Python 3.11, 0.19.2 on 3.12) on our dispatchers, without a change to it.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from moe_ep.integrations.megatron import use_moe_ep

    config = TransformerConfig(..., num_moe_experts=64, moe_token_dispatcher_type="alltoall")
    spec = use_moe_ep(get_gpt_decoder_block_spec(config, use_transformer_engine=True), dispatcher="direct",
                      max_tokens=8192)
    model = use_domino(GPTModel(config, spec, ...), micro_batches=2)

Everything but the travel of tokens is Megatron's own. What is not served is refused when the layer is built, with the
flag's name; `megatron_limits` has the list. Call `moe_ep.close_dispatchers` before the process groups go.
"""

from __future__ import annotations

from .megatron_limits import TRIED, megatron_version

megatron_version()  # says what to install, before the imports below fail on it

from .megatron_domino import DominoTransformerBlock, use_domino  # noqa: E402
from .megatron_layer import MegatronMoELayer, moe_layers, moe_spec, use_moe_ep  # noqa: E402

__all__ = [
    "TRIED",
    "DominoTransformerBlock",
    "MegatronMoELayer",
    "moe_layers",
    "moe_spec",
    "use_domino",
    "use_moe_ep",
]
