"""The dtype of each station: what is not said is as the station before."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_zero.autocast import is_multiplied
from lightning_zero.precision import RECIPES, Dtypes, PrecisionRecipe

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def of(recipe, own, trained=True, gathered=True, multiplied=True):
    return recipe.dtypes(own, trained=trained, gathered=gathered, multiplied=multiplied)


@pytest.mark.parametrize("own", [f64, f32, bf16, f16, torch.complex64, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["32-true", "64-true", "bf16-true", "16-true"])
def test_true_precisions_keep_each_parameters_own_dtype(name, own):
    """At every station."""
    assert of(RECIPES[name], own) == Dtypes(own, own, own, own, own, own, narrow=False)


@pytest.mark.parametrize("name, narrow", [("bf16-mixed", bf16), ("16-mixed", f16)])
def test_mixed_precisions_hold_fp32_and_gather_two_bytes_of_what_autocast_casts(name, narrow):
    """A matrix; a norm; a matrix of a model that was loaded in two bytes."""
    recipe = RECIPES[name]
    assert of(recipe, f32) == Dtypes(f32, f32, narrow, f32, f32, f32, narrow=True)
    assert of(recipe, f32, multiplied=False) == Dtypes(f32, f32, f32, f32, f32, f32, narrow=False)
    assert of(recipe, narrow) == Dtypes(narrow, f32, narrow, f32, f32, f32, narrow=False)


@pytest.mark.parametrize("own", [f64, torch.complex64, torch.int8, torch.bool])
def test_what_autocast_leaves_alone_passes_every_recipe(own):
    """A float64 weight, a quantized one."""
    recipe = PrecisionRecipe(f32, bf16, bf16, bf16, bf16, bf16, bf16)
    assert of(recipe, own) == Dtypes(own, own, own, own, own, own, narrow=False)


def test_frozen_parameters_have_no_master_copy():
    """One copy in their own dtype; what a gather makes of it is narrow, where a gather makes one."""
    recipe = RECIPES["bf16-mixed"]
    assert of(recipe, bf16, trained=False).main is bf16
    sharded = of(recipe, f32, trained=False)
    assert (sharded.main, sharded.model) == (f32, bf16)
    resting = of(recipe, f32, trained=False, gathered=False)
    assert (resting.main, resting.model) == (f32, f32)


def test_without_a_gather_there_is_no_narrow_copy():
    """Alone, or at stage 0, whole main weights rest: 4 bytes, not 4 and 2."""
    assert of(RECIPES["bf16-mixed"], f32, gathered=False) == Dtypes(f32, f32, f32, f32, f32, f32, narrow=False)


def test_gradients_follow_the_main_weight_unless_told():
    """Each field changes its station and those that follow from it."""
    for fields, expected in [
        ({"gradient": bf16}, (bf16, bf16, f32)),
        ({"reduce": bf16}, (f32, bf16, f32)),
        ({"main_grad": bf16}, (f32, f32, bf16)),
    ]:
        dtypes = of(PrecisionRecipe(main=f32, **fields), f32)
        assert (dtypes.gradient, dtypes.reduce, dtypes.main_grad) == expected


MODULES = {
    "linear": (nn.Linear(3, 4), {"weight", "bias"}),
    "conv": (nn.Conv2d(3, 4, 3), {"weight", "bias"}),
    "transposed conv": (nn.ConvTranspose1d(3, 4, 3), {"weight", "bias"}),
    "attention": (
        nn.MultiheadAttention(4, 2, kdim=3),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"},
    ),
    "embedding": (nn.Embedding(3, 4), set()),
    "norm": (nn.LayerNorm((3, 4)), set()),
    "lstm": (nn.LSTM(3, 4), set()),
    "bilinear": (nn.Bilinear(3, 4, 5), set()),
}


@pytest.mark.parametrize("name", MODULES)
def test_known_products(name):
    """By module class: autocast's lists, seen by their effect in torch."""
    module, expected = MODULES[name]
    parameters = module.named_parameters(recurse=False)
    assert {attribute for attribute, p in parameters if is_multiplied(module, attribute, p)} == expected


def test_a_linear_that_computes_in_its_own_way_is_none():
    """Its weight may be normalized, or looked up."""

    class Cosine(nn.Linear):
        def forward(self, x):
            return x @ nn.functional.normalize(self.weight).t()

    module = Cosine(3, 4)
    assert not is_multiplied(module, "weight", module.weight)


def test_experts_of_transformers_are_products_and_unknown_stacks_are_not():
    """A table of positions, or a codebook, is looked up."""

    class Codebooks(nn.Module):
        pass

    with torch.device("meta"):
        config = MixtralConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_local_experts=4)
        experts = MixtralForCausalLM(config).model.layers[0].mlp.experts
    assert is_multiplied(experts, "gate_up_proj", experts.gate_up_proj)
    assert not is_multiplied(Codebooks(), "books", torch.empty(4, 3, 5))
