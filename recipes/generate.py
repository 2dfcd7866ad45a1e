"""Text from a model, also while its experts are spread over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.schema import require

from .data import END_OF_DOCUMENT, VOCAB_SIZE, decode
from .model import Decoder


@torch.no_grad()
def generate(
    model: Decoder, prompt: bytes, max_new_tokens: int, temperature: float, seed: int, *, context: int = 256
) -> bytes:
    """Continue `prompt` as the start of a document; a collective call on every rank, with equal arguments.

    Every rank computes every token, so all call the layers equally often, and the first rank of an expert-parallel
    group chooses for the others: their logits may differ in the last bits. Without a cache of keys, so it is slow.

    Args:
        model: in training or evaluation mode, which it is left in.
        prompt: may be empty.
        max_new_tokens: tokens to sample; what follows the end of the document is left out of the result.
        temperature: of the softmax; 0 takes the likeliest token.
        seed: of the sampling.
        context: most tokens that the model sees at once; never more than the dispatcher's max_tokens.

    Returns:
        The new bytes, without the prompt.

    Raises:
        RecipeError: a negative temperature or a number below 1.
    """
    require(temperature >= 0, f"temperature must not be negative, got {temperature}")
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    require(context >= 1, f"context must be at least 1, got {context}")
    context = min(context, model.moe_config.max_tokens or context)
    generator = torch.Generator().manual_seed(seed)
    device = model.embed.weight.device
    tokens, new = [END_OF_DOCUMENT, *prompt], []
    was_training = model.training
    model.eval()
    try:
        # no early stop: another group of ranks may still be generating, and sharded layers need everybody
        for _ in range(max_new_tokens):
            ids = torch.tensor([tokens[-context:]], device=device)
            logits, _ = model(ids)
            new.append(_agree(_choose(logits[0, -1], temperature, generator), model.group, device))
            tokens.append(new[-1])
    finally:
        model.train(was_training)
    end = new.index(END_OF_DOCUMENT) if END_OF_DOCUMENT in new else len(new)
    return decode(new[:end])


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    logits_V = logits_V[:VOCAB_SIZE].float().cpu()  # a padded vocabulary has entries that are no token
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def _agree(token: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    if group is None:
        return token
    shared = torch.tensor(token, device=device)
    dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
    return int(shared)
