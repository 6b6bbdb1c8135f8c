"""What autocast computes in two bytes: which weights it casts, and which functions do it.

Such a weight is gathered in the narrow dtype, since it would be cast anyway. Autocast's own functions take it as it is;
any other one, and everything outside autocast, gets it in the dtype that the code expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["any_casts_down", "casts_down", "is_multiplied"]

_PRODUCTS = (
    nn.Linear,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Modules whose weight and bias go to a product and nowhere else."""

_NARROW_FUNCTIONS = {
    # What autocast casts down.
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "multi_dot",
    "scaled_dot_product_attention", "multi_head_attention_forward",
    # Views: what they give goes on to the functions above.
    "t", "transpose", "swapaxes", "permute", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten",
    "unsqueeze", "squeeze", "expand", "expand_as", "__getitem__", "select", "narrow", "chunk", "split", "unbind",
    "tensor_split", "contiguous", "T", "mT",
}  # fmt: skip


def is_multiplied(module: nn.Module, attribute: str, parameter: Tensor) -> bool:
    """Whether ``module`` uses its ``attribute`` in products alone, as far as its class tells.

    The stacks of matrices in which transformers keeps the experts of a mixture count. Unknown modules' matrices do not:
    one that is added or looked up would come out rounded.
    """
    kind = type(module)
    if any(isinstance(module, known) and kind.forward is known.forward for known in _PRODUCTS):
        return attribute in ("weight", "bias")
    if kind is nn.MultiheadAttention:
        return attribute.endswith(("proj_weight", "proj_bias"))
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return True
    return (
        kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("Experts") and parameter.ndim == 3
    )


def casts_down(func: Any, device: torch.device) -> bool:
    """Whether ``func``, a function of torch called now on ``device``, computes in autocast's dtype."""
    if not torch.is_autocast_enabled(device.type):
        return False
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
    return name in _NARROW_FUNCTIONS


def any_casts_down(func: Any, args: Sequence[Any]) -> bool:
    """Whether ``func``, called now with ``args``, computes in autocast's dtype. `torch.compile` traces this."""
    return any(casts_down(func, arg.device) for arg in args if isinstance(arg, Tensor))
