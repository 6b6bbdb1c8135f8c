"""How models of many kinds are cut: how much is in units, and the largest part that is whole at one time.

Built on meta, of their usual sizes. The goal for each: no unit above 1/4 of the model that could be divided, and no
root above it but for one parameter, as an embedding that is the head as well.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero
from lightning_zero.activation import activation_policies, chosen_policies
from lightning_zero.cut import ROOT_SHARE
from lightning_zero.holders import holders_of_parameters, homes
from lightning_zero.units import find_units


class Named(nn.Module):
    """Blocks by name, without a list."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(12):
            setattr(self, f"block{i}", nn.TransformerEncoderLayer(256, 4, 1024))


class UNet(nn.Module):
    """Nine double convolutions, of 64 to 1024 channels and back."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 512, 1024]
        names = ["down1", "down2", "down3", "down4", "middle"]
        for name, before, after in zip(names, widths, widths[1:]):
            setattr(self, name, double(before, after))
        for i, width in enumerate([512, 256, 128, 64]):
            setattr(self, f"up{4 - i}", double(2 * width, width))


def double(before: int, after: int) -> nn.Sequential:
    """Two convolutions with their norms."""
    convolutions = [nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)]
    return nn.Sequential(*(part for conv in convolutions for part in (conv, nn.BatchNorm2d(after), nn.ReLU())))


class GAN(nn.Module):
    """As DCGAN: a generator and a discriminator of four convolutions each."""

    def __init__(self) -> None:
        super().__init__()
        up, down = [100, 512, 256, 128, 3], [3, 128, 256, 512, 1]
        self.generator = nn.Sequential(*(nn.ConvTranspose2d(a, b, 4) for a, b in pairwise(up)))
        self.discriminator = nn.Sequential(*(nn.Conv2d(a, b, 4) for a, b in pairwise(down)))


class Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(10_000, 512), nn.LSTM(512, 512, 2), nn.Linear(512, 10_000)


class Two(nn.Module):
    """As small as a test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)


def encoder(blocks: int) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048), blocks)


def wide() -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(4096, 4096), nn.ReLU())))


def tiny_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=256, **sizes))


def llava() -> nn.Module:
    text = hf.LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16)
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, float, float]] = {
    # name: builder, units, share in units, largest part (a unit, or the root)
    "Transformer of 2": (encoder(2), 6, 1.00, 0.17),  # attention and two products a block, a third of it each
    "Transformer of 4": (encoder(4), 4, 1.00, 0.25),
    "Transformer of 6": (encoder(6), 6, 1.00, 0.17),
    "Transformer of 8": (encoder(8), 8, 1.00, 0.12),
    "Transformer of 12": (encoder(12), 12, 1.00, 0.08),
    "Transformer of 24": (encoder(24), 24, 1.00, 0.04),
    "Transformer of 48": (encoder(48), 48, 1.00, 0.02),
    "encoder and decoder": (nn.Transformer, 12, 1.00, 0.10),
    "named blocks": (Named, 12, 1.00, 0.08),
    "U-Net": (UNet, 8, 0.97, 0.33),  # one convolution of 1024 channels
    "wide MLP": (wide, 3, 1.00, 0.33),
    "GAN": (GAN, 5, 1.00, 0.34),
    "LSTM": (Recurrent, 3, 1.00, 0.35),
    "two Linears": (Two, 2, 1.00, 0.50),
    "BERT": (lambda: hf.BertModel(hf.BertConfig()), 12, 0.78, 0.22),
    "DistilBERT": (lambda: hf.DistilBertModel(hf.DistilBertConfig()), 6, 0.64, 0.36),  # the root: an embedding, 0.35
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig()), 12, 0.99, 0.08),
    "GPT-2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config()), 12, 0.68, 0.32),  # the embedding is the head: 0.31
    "Llama, tiny": (tiny_llama, 5, 0.85, 0.21),
    "T5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config()), 12, 0.73, 0.27),  # as GPT-2
    "Whisper": (lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig()), 9, 0.45, 0.55),  # 0.53
    "CLIP": (lambda: hf.CLIPModel(hf.CLIPConfig()), 24, 0.81, 0.19),
    "ResNet-50": (lambda: hf.ResNetForImageClassification(hf.ResNetConfig()), 17, 0.99, 0.10),
    "ConvNeXt": (lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig()), 14, 0.98, 0.17),
    "Swin": (lambda: hf.SwinForImageClassification(hf.SwinConfig()), 12, 0.99, 0.17),
    "LLaVA": (llava, 38, 0.99, 0.06),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_cut(name: str) -> None:
    """Policies have what they apply to, or nothing to win, without an error."""
    build, number, share, largest = MODELS[name]
    with torch.device("meta"):
        model = build()
    units = find_units(model)
    members = [member for unit in units for _, member in unit]
    inside = Counter(module for member in members for module in member.modules())
    assert not inside or max(inside.values()) == 1, "units are nested"
    home_of = homes(holders_of_parameters(model), units)
    numel: Counter[int | None] = Counter()
    for parameter, home in home_of.items():
        numel[home] += parameter.numel()
    total, root = sum(numel.values()), numel[None]
    assert len(units) == number
    assert 1 - root / total == pytest.approx(share, abs=0.006)
    assert max(numel.values()) / total == pytest.approx(largest, abs=0.006)
    for i, unit in enumerate(units):
        one_layer = len(unit) == 1 and not any(True for child in unit[0][1].children())
        assert numel[i] <= total / 4 or one_layer, unit
    one = max((parameter.numel() for parameter, home in home_of.items() if home is None), default=0)
    assert root <= total / 4 or root - one <= total * ROOT_SHARE
    for policy in ("full", "selective", "offload"):
        chosen_policies(model, members, activation_policies(policy))


def test_recomputation_leaves_single_layers_alone() -> None:
    """Their input is what they keep; a head would be the costliest of them. To the host it may move all the same."""
    with torch.device("meta"):
        model = tiny_llama()
    members = [member for unit in find_units(model) for _, member in unit]
    layers = model.get_submodule("model.layers")
    blocks = [part for layer in layers for part in (layer.get_submodule("self_attn"), layer.get_submodule("mlp"))]
    for policy, expected in (("full", blocks), ("selective", blocks), ("offload", [*blocks, model.lm_head])):
        assert list(chosen_policies(model, members, activation_policies(policy))) == expected


class Bare(nn.Module):
    """Two parameters of its own, and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x * self.a)) + self.b


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("build", [Bare, lambda: nn.Linear(3, 3)], ids=["bare", "one layer"])
def test_a_policy_without_anything_to_win_is_no_error(build: Callable[[], Any], policy: str) -> None:
    """The plain module's step is the one that is taken."""
    plain = build()
    model = lightning_zero.shard(copy.deepcopy(plain), activation_checkpointing=policy)
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        module(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
    lightning_zero.unshard(model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_set_up_says_how_the_model_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """One line. 4 * 12 bytes of the layer, and 4 * 6 of two parameters that are in no unit."""
    caplog.set_level(logging.INFO, "lightning_zero")
    lightning_zero.shard(Bare(), activation_checkpointing="full")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "`Bare` at stage 3: 1 unit, the largest `layer` (0.048 kB, 67% of the model); in no unit, whole from forward"
        " to backward at stage 3: 0.024 kB, 33%, most of it `a`; activation checkpointing of nothing: no unit would"
        " keep less."
    )
