"""The dtype of each station: what is not said is as the station before."""

import pytest
import torch

from lightning_zero.precision import PrecisionRecipe

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("own", [*FLOATS, torch.int64, torch.uint8])
def test_no_recipe_keeps_each_parameters_own_dtype(own):
    """All four stations."""
    recipe = PrecisionRecipe()
    assert {recipe.main_dtype(own), recipe.model_dtype(own), recipe.reduce_dtype(own)} == {own}


@pytest.mark.parametrize("own", FLOATS)
def test_each_station_defaults_to_the_one_before(own):
    """main -> model; gradients add up and travel as main weights are."""
    assert PrecisionRecipe(main=torch.float32).reduce_dtype(own) is torch.float32
    mixed = PrecisionRecipe(compute=torch.bfloat16)
    assert (mixed.main_dtype(own), mixed.model_dtype(own), mixed.reduce_dtype(own)) == (
        own,
        torch.bfloat16,
        own,
    )
    careful = PrecisionRecipe(main=torch.float32, compute=torch.float16, reduce=torch.float32)
    assert (careful.main_dtype(own), careful.model_dtype(own), careful.reduce_dtype(own)) == (
        torch.float32,
        torch.float16,
        torch.float32,
    )


def test_integers_have_no_precision_to_lower():
    """A quantised weight keeps its integers under every recipe."""
    recipe = PrecisionRecipe(torch.float32, torch.bfloat16, torch.float32)
    for own in (torch.int8, torch.int64, torch.bool):
        assert {recipe.main_dtype(own), recipe.model_dtype(own), recipe.reduce_dtype(own)} == {own}
