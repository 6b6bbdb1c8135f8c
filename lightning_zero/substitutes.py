"""What stands in a module's attributes in the place of its own parameters and buffers for the time of one call.

    functional_call(block, weights, x)     block.weight = weights["weight"] | forward | block.weight = its own

A forward that is computed again in backward finds its own there, unless the substitutes are put back for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_zero.sharded_parameter import ShardedParameter
from lightning_zero.whole_parameter import WholeParameter

__all__ = ["the_same_again"]

Place = tuple[dict[str, Any], str, Tensor]
"""Parameters or buffers of a module, a name there, and what it holds."""


def the_same_again(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, whose later calls find the parameters and buffers in ``module``'s attributes that are there now."""
    places = list(_places(module))
    calls = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 or all(held.get(name) is value for held, name, value in places):
            return forward(*args, **kwargs)
        with _put_back(places):
            return forward(*args, **kwargs)

    return run if places else forward


def _places(module: nn.Module) -> Iterator[Place]:
    """Of buffers, and of parameters that are not the module's own: windows exchange those."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and not isinstance(value, ShardedParameter | WholeParameter):
                yield part._parameters, name, value
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name, buffer


@contextmanager
def _put_back(places: list[Place]) -> Iterator[None]:
    before = [held.get(name) for held, name, _ in places]
    for held, name, value in places:
        held[name] = value
    try:
        yield
    finally:
        for (held, name, _), own in zip(places, before, strict=True):
            held[name] = own
