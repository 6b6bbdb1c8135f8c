"""Which attributes of a module hold which parameters, before it is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.units import NamedModules
from lightning_zero.whole_parameter import WholeParameter

__all__ = [
    "AlreadyShardedError",
    "Holder",
    "Holders",
    "drop_references",
    "flatten_again",
    "holders_of_parameters",
    "homes",
    "keep_layout",
]


class AlreadyShardedError(RuntimeError):
    """A module, or a part of it, is sharded already."""


@dataclass(frozen=True)
class Holder:
    """One attribute that holds a parameter; ``name`` is its full name."""

    module: nn.Module
    attribute: str
    name: str


Holders = dict[Tensor, list[Holder]]
"""By parameter, in definition order."""


def holders_of_parameters(module: nn.Module) -> Holders:
    """Every attribute below ``module`` that holds a parameter, by parameter, in definition order.

    Raises:
        AlreadyShardedError: a parameter is sharded.
        ValueError: a parameter is uninitialized.
        TypeError: a parameter is of a class of its own.
    """
    holders: Holders = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(parameter, ShardedParameter | WholeParameter):
                raise AlreadyShardedError(
                    f"`{name}` is sharded already. Call `lightning_zero.unshard(module)` before it is sharded again."
                )
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"`{name}` is uninitialized: its shape is unknown. Run one forward of the lazy module before it is"
                    " sharded."
                )
            if type(parameter) is not nn.Parameter:
                # Quantized weights are such: fragments would have neither their methods nor their layout.
                raise TypeError(
                    f"`{name}` is a {type(parameter).__name__}, and only the plain `nn.Parameter` can be sharded. Keep"
                    " the data in one, which may hold integers and attributes of its own, before the module is sharded:"
                    f" `nn.Parameter(data, requires_grad={parameter.requires_grad})`."
                )
            holders.setdefault(parameter, []).append(Holder(owner, attribute, name))
    return holders


def require_values(holders: Holders) -> None:
    for parameter, places in holders.items():
        if parameter.is_meta:
            raise ValueError(
                f"`{places[0].name}` is on the meta device of rank 0, whose values are everyone's. Give it values"
                " first: `module.to_empty(device='cpu')` and an initializer, or a checkpoint."
            )


def homes(holders: Holders, plan: Sequence[NamedModules]) -> dict[Tensor, int | None]:
    """The unit of each parameter; ``None`` is the root, where parameters of several units go too."""
    number: dict[nn.Module, int] = {}
    for i, members in enumerate(plan):
        for _, member in members:
            for module in member.modules():
                number.setdefault(module, i)
    found: dict[Tensor, int | None] = {}
    for parameter, places in holders.items():
        numbers = {number.get(holder.module) for holder in places}
        found[parameter] = numbers.pop() if len(numbers) == 1 else None
    return found


def drop_references(module: nn.Module) -> None:
    """Drop what modules keep of their parameters beside the parameters: torch exchanges no tensor under a reference."""
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            # Weak ones, only to notice a replacement.
            submodule._flat_weight_refs = [None for _ in submodule._flat_weight_refs]
        for name, value in vars(submodule).items():
            # A weight that `nn.utils.weight_norm` computed; it does so before each forward.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(submodule)[name] = value.detach()


def keep_layout(module: nn.Module) -> None:
    """Have recurrent modules leave their parameters where they lie, until `flatten_again`.

    User code has them do otherwise before a forward: they would lay raw memory out anew, which is the groups' own.
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            submodule.flatten_parameters = _stay_as_laid_out  # type: ignore[method-assign]


def _stay_as_laid_out() -> None:
    """What ``flatten_parameters`` of a recurrent module does while its parameters are sharded."""


def flatten_again(module: nn.Module) -> None:
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            vars(submodule).pop("flatten_parameters", None)
