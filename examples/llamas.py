"""What benchmarks train: random Llamas on random tokens, the same for every contender."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
SEED = 0


def llama(layers: int, hidden: int, vocab: int, **others: Any) -> dict[str, Any]:
    """Arguments of `LlamaConfig`: heads of 64 and an MLP of 8/3 the width, as Llama has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": 8 * hidden // 3 // HEAD_DIM * HEAD_DIM,
        "num_attention_heads": hidden // HEAD_DIM,
        "tie_word_embeddings": False,
        **others,
    }


SMOLLM2 = {"intermediate_size": 1536, "num_key_value_heads": 3, "tie_word_embeddings": True}
MODELS = {
    "toy": llama(2, 64, 64),
    "llama-29m": llama(8, 512, 4096),
    "smollm2": llama(30, 576, 49152, **SMOLLM2),
    "narrow": llama(100, 64, 1024),
    "vocabulary": llama(4, 256, 128_000),
    "llama-0.3b": llama(4, 2048, 32000),
    "llama-1b": llama(18, 2048, 32000),
}
"""By the name that ``--model`` takes: "smollm2" has the shape of SmolLM2-135M, "narrow" many small units, "vocabulary"
a root that is larger than all units."""


def build_llama(arguments: dict[str, Any], seq_len: int) -> LlamaForCausalLM:
    """A Llama on the default device, with weights that depend on its arguments alone."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**arguments, max_position_embeddings=seq_len, use_cache=False))


def random_tokens(shape: tuple[int, ...], vocab: int, rank: int) -> Tensor:
    """Tokens of ``shape`` for one rank, frequent and rare ones.

    With equal frequencies there is nothing to learn, and any update gives one loss.
    """
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(SEED + rank))
    return (draws**4 * vocab).long()
