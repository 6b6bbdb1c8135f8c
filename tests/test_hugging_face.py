"""Models of `transformers` as they are: they train, generate and describe themselves as in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from twin import adamw, build, compare

STAGES = (1, 2, 3)
VOCABULARY = 13


def ids(seed: int, *shape: int) -> Tensor:
    """Random tokens."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> dict[str, Tensor]:
    """Two texts of different length, to be continued."""
    tokens = ids(seed, 2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def classes(seed: int) -> dict[str, Tensor]:
    """Two texts and the class of each."""
    return {"input_ids": ids(seed, 2, 6), "labels": ids(seed, 2) % 3}


def images(seed: int) -> dict[str, Tensor]:
    """Two images and the class of each."""
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": ids(seed, 2) % 3}


def translation(seed: int) -> dict[str, Tensor]:
    """Two texts and what they become."""
    return {"input_ids": ids(seed, 2, 6), "labels": ids(seed + 50, 2, 4)}


class Losing(nn.Module):
    """A model and the loss it computes itself, on data drawn from a seed."""

    def __init__(self, model: nn.Module, data: Callable[[int], dict[str, Tensor]] = text) -> None:
        super().__init__()
        self.model = model.train()
        self.data = data

    def forward(self, seed: int) -> Tensor:
        return self.model(**self.data(seed)).loss  # type: ignore[no-any-return]


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 9, "num_hidden_layers": 3,
    "num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 6, "n_layer": 3, "n_head": 2, "bos_token_id": None,
    "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip


def t5() -> Losing:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=6, d_kv=3, d_ff=7, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return Losing(hf.T5ForConditionalGeneration(config), translation)


def vit() -> Losing:
    config = hf.ViTConfig(
        hidden_size=6, num_hidden_layers=3, num_attention_heads=2, intermediate_size=7, image_size=8, patch_size=4,
        num_labels=3, **DRY,
    )  # fmt: skip
    return Losing(hf.ViTForImageClassification(config), images)


def mamba() -> Losing:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=6, state_size=3, num_hidden_layers=3, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return Losing(hf.MambaForCausalLM(config), lambda seed: {"input_ids": ids(seed, 2, 6), "labels": ids(seed, 2, 6)})


def whisper() -> Losing:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=6, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=7, decoder_ffn_dim=7, num_mel_bins=4, max_source_positions=4,
        max_target_positions=8, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def speech(seed: int) -> dict[str, Tensor]:
        features = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
        return {"input_features": features, "labels": ids(seed, 2, 5)}

    return Losing(hf.WhisperForConditionalGeneration(config), speech)


def clip() -> Losing:
    config = hf.CLIPConfig(
        text_config={**SMALL, "hidden_size": 6, "eos_token_id": 12, "bos_token_id": 11},
        vision_config={
            "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4,
        },
        projection_dim=5,
    )  # fmt: skip

    def pairs(seed: int) -> dict[str, Any]:
        return {"input_ids": ids(seed, 2, 5), "pixel_values": images(seed)["pixel_values"], "return_loss": True}

    return Losing(hf.CLIPModel(config), pairs)


def bert() -> Losing:
    config = hf.BertConfig(**{**SMALL, **DRY}, num_labels=3)
    return Losing(hf.BertForSequenceClassification(config), classes)


def gemma() -> Losing:
    """Tied head, scaled embedding, sliding windows."""
    config = hf.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=6, sliding_window=3)
    return Losing(hf.Gemma2ForCausalLM(config))


MODELS: dict[str, Callable[[], Losing]] = {
    "GPT-2": lambda: Losing(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))),
    "Gemma 2": gemma,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
    "CLIP": clip,
    "Whisper": whisper,
    "Mamba": mamba,
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_plain_process(name: str, stage: int) -> None:
    """Losses, gradients and values of two steps, to 1e-10 in float64: decoders, encoders, both, and two towers."""
    compare(MODELS[name], stage, steps=2)


# Mixture of experts: the weights of all experts of a layer are one parameter of three dimensions

MOE = {**SMALL, "num_key_value_heads": 1, "num_experts_per_tok": 2, "output_router_logits": True}


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**MOE, num_local_experts=5))


def qwen2_moe() -> nn.Module:
    """With a shared expert beside the others."""
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**MOE, num_experts=5, moe_intermediate_size=7, shared_expert_intermediate_size=5)
    )


def qwen3_moe() -> nn.Module:
    """The first layer is dense."""
    config = hf.Qwen3MoeConfig(**MOE, head_dim=6, num_experts=5, moe_intermediate_size=7, mlp_only_layers=[0])
    return hf.Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    """Biases of two dimensions, and attention sinks."""
    config = hf.GptOssConfig(
        **{**MOE, "max_position_embeddings": 32}, head_dim=6, num_local_experts=5, sliding_window=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return hf.GptOssForCausalLM(config)


EXPERTS = {
    "Mixtral": (mixtral, "eager"),
    "Mixtral, batched": (mixtral, "batched_mm"),
    "Qwen2": (qwen2_moe, "eager"),
    "Qwen3": (qwen3_moe, "batched_mm"),
    "GPT-OSS": (gpt_oss, "eager"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_train_where_ranks_route_to_different_ones(name: str, stage: int) -> None:
    """Rank 0 sees one token twice, so that at most four of five experts work there; 1e-10 at all stages."""
    build_model, implementation = EXPERTS[name]

    def data(seed: int) -> dict[str, Tensor]:
        batch = text(seed)
        if seed % 10 == 0:
            once = batch["input_ids"][:1, :1].expand(1, 2)
            batch = {"input_ids": once, "attention_mask": torch.ones_like(once), "labels": once}
        return batch

    def make() -> Losing:
        model = build_model()
        model.set_experts_implementation(implementation)
        return Losing(model, data)

    compare(make, stage, steps=2)


# Preference tuning


class Preferring(nn.Module):
    """Direct preference optimization: a policy, and the frozen copy of it that it may not leave too far."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()

    def forward(self, seed: int) -> Tensor:
        chosen, rejected = ids(seed, 2, 6), ids(seed + 50, 2, 6)
        gains = self.gain(chosen) - self.gain(rejected)
        return -nn.functional.logsigmoid(0.5 * gains).mean()

    def gain(self, tokens: Tensor) -> Tensor:
        """How much likelier the policy is to write ``tokens`` than the reference is, shape (2,)."""
        with torch.no_grad():
            expected = log_likelihood(self.reference, tokens)
        return log_likelihood(self.policy, tokens) - expected


def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each text, shape (2,)."""
    scores = model(tokens).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).sum((1, 2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_policy_and_its_frozen_reference_train_as_in_one_plain_process(stage: int) -> None:
    """Four forwards a loss, two of them without gradient; the reference keeps every bit and the policy leaves it."""
    twin = compare(Preferring, stage, optimizer=adamw)
    for name, value in twin.live.items():
        if name.startswith("policy."):
            assert not torch.equal(value, twin.live[name.replace("policy", "reference")]), name
    start = build(Preferring, 0, torch.float64)
    for name, value in start.reference.state_dict().items():
        assert torch.equal(value, twin.after[f"reference.{name}"]), name
