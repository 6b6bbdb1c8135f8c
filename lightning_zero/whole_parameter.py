"""The leaf that stands for a resting parameter while its unit's window is open.

    WholeParameter       a view of the whole buffer: modules compute with it at full speed
    NarrowParameter      one whose buffer has autocast's dtype: it widens for what autocast does not cast
    ConcealedParameter   the same object after the window closed: its next use opens the window again

A leaf keeps its identity, so a graph built through it accumulates into it whenever backward comes. What user code
writes on it (`grad`, `requires_grad`, hooks, attributes of its own) reaches the resting parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.autocast import any_casts_down, casts_down
from lightning_zero.sharded_parameter import (
    GRADIENT_REQUESTS,
    Owner,
    ShardedParameter,
    check_data,
    reads_metadata,
    writes_in_place,
)

__all__ = ["ConcealedParameter", "NarrowParameter", "WholeParameter", "stored_dtype"]

# Torch's own attributes, past the properties below.
_raw_data = cast(Any, torch.Tensor.data)
_raw_requires_grad = cast(Any, torch.Tensor.requires_grad)
_raw_dtype = cast(Any, torch.Tensor.dtype)

# A widened value has memory for the moment of the call.
_MEMORY_REQUESTS = {torch.Tensor.untyped_storage, torch.Tensor.data_ptr}


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of what ``tensor`` holds; a narrow leaf tells another one."""
    return cast(torch.dtype, _raw_dtype.__get__(tensor))


class WholeParameter(nn.Parameter):
    """An ordinary parameter to torch; in Python it shares its gradient and flags with the resting one.

    Made empty by `of` and pointed to a buffer later: its version counter is its own, not the buffer's.
    """

    _resting: ShardedParameter
    _index: int
    _counts_data_writes: bool
    _expected: torch.dtype

    @classmethod
    def of(
        cls,
        resting: ShardedParameter,
        index: int,
        dtype: torch.dtype,
        counts_data_writes: bool,
        expected: torch.dtype | None = None,
    ) -> WholeParameter:
        """A leaf for ``resting``, which is number ``index`` of its group.

        Args:
            expected: the dtype that code expects of its value, where it is not ``dtype``.
            counts_data_writes: whether writes through ``data`` advance the leaf's version, because they must be noticed
                and folded back. Torch's own ``data`` hides them.
        """
        with torch.inference_mode(False):
            leaf = cls(torch.empty(0, dtype=dtype, device=resting.device), requires_grad=resting.requires_grad)
        leaf._resting = resting
        leaf._index = index
        leaf._counts_data_writes = counts_data_writes
        leaf._expected = expected or dtype
        # Autograd adds up the gradients of several uses in this dtype. In two bytes each addition would round, where
        # data parallelism, whose uses cast one by one, adds in the dtype of the parameter.
        leaf.grad_dtype = leaf._expected
        return leaf

    def __getattr__(self, name: str) -> Any:
        """What user code noted on the parameter, as a quantized weight's scale."""
        try:
            return self.__dict__["_resting"].__dict__[name]
        except KeyError:
            raise AttributeError(f"'Parameter' object has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        # Not a property: `torch.compile` reads torch's own attributes without the end of a graph.
        if name == "requires_grad":
            _raw_requires_grad.__set__(self, value)
            self._resting.requires_grad = value
            return
        # The class knows torch's attributes and ours.
        holder = self if hasattr(WholeParameter, name) or name in WholeParameter.__annotations__ else self._resting
        object.__setattr__(holder, name, value)

    @staticmethod
    def point_all(leaves: Iterable[WholeParameter], values: Iterable[Tensor]) -> None:
        """Let each leaf become a view of its whole value, which has the parameter's shape."""
        for leaf, value in zip(leaves, values, strict=True):
            _raw_data.__set__(leaf, value)

    def seen_by(self, func: Any) -> Tensor:
        """What ``func``, a function of torch, takes in place of this leaf: the leaf, or its value widened."""
        if self._is_exact or casts_down(func, self.device):
            return self
        if reads_metadata(func) or writes_in_place(func) or func in GRADIENT_REQUESTS or func in _MEMORY_REQUESTS:
            return self
        return self.to(self._expected)

    @property
    def _is_exact(self) -> bool:
        return stored_dtype(self) == self._expected

    def follow_requires_grad(self) -> None:
        """Take ``requires_grad`` from the resting parameter."""
        wanted = self._resting.requires_grad
        if _raw_requires_grad.__get__(self) != wanted:
            _raw_requires_grad.__set__(self, wanted)

    @property
    def grad(self) -> Tensor | None:
        """The resting parameter's gradient."""
        if CompileContext.try_get() is not None:
            # A compiler looks at its dtype. Reading it may be a collective, and ranks compile when they like.
            return None
        return self._resting.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._resting.grad = value

    @grad.deleter
    def grad(self) -> None:
        self._resting.grad = None

    def requires_grad_(self, requires_grad: bool = True) -> WholeParameter:
        """Set ``requires_grad`` here and on the resting parameter."""
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> Tensor:
        """The whole value without gradient; writes through it are folded back when the window closes."""
        if self._counts_data_writes:
            return self.detach()
        return cast(Tensor, _raw_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        # What moves nothing, as `module.to(device)` in a step, assigns a parameter to itself.
        if value is not self and not _is_same_memory(value, self):
            check_data(self._resting, value)
            self.data.copy_(value)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """As on the resting parameter."""
        return self._resting.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file written inside `gathered` must open where this package is not installed.
        plain = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements in the same places."""
    return bool(cast(Any, torch._C)._is_alias_of(one, other)) and (
        (one.dtype, one.shape, one.stride(), one.storage_offset())
        == (other.dtype, other.shape, other.stride(), other.storage_offset())
    )


_CONVERSIONS = {
    torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16,
    torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.type,
}  # fmt: skip


def _converts_nothing(func: Any, leaf: WholeParameter, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the conversion ``func`` of a tensor that is as code expects ``leaf`` to be gives that tensor itself."""
    like = torch.empty(0, dtype=leaf._expected, device=leaf.device)
    return func(like, *args[1:], **kwargs) is like


def _handles_state(func: Any) -> bool:
    """Whether ``func`` copies values or writes them, in place of computing: a narrow leaf has not all their digits."""
    return func is torch.Tensor.detach or func is torch.Tensor.clone or writes_in_place(func)


class NarrowParameter(WholeParameter):
    """A leaf in autocast's dtype, of which code expects another one.

    Autocast's functions take it as it is, others its value widened. What copies or writes meets the resting parameter.
    """

    @property
    def dtype(self) -> torch.dtype:
        """What the code expects."""
        return stored_dtype(self) if CompileContext.try_get() is not None else self._expected

    @property
    def data(self) -> Tensor:
        """The resting parameter's value."""
        if not torch._C._is_torch_function_enabled():  # a compiled graph looks at what it computes with
            return cast(Tensor, _raw_data.__get__(self))
        return self._resting.data

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:
            self._resting.data = value

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self._resting.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # What `torch.compile` meets in a block ends here; where it does not, the graph ends.
            if any_casts_down(func, args):
                return func(*args, **kwargs)
        if _handles_state(func):
            args, kwargs = tree_map_only(NarrowParameter, lambda leaf: leaf._resting, (args, kwargs))
            return func(*args, **kwargs)
        if func in _CONVERSIONS and _converts_nothing(func, args[0], args, kwargs):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(NarrowParameter, lambda leaf: leaf.seen_by(func), (args, kwargs))
            return func(*args, **kwargs)


class ConcealedParameter(WholeParameter):
    """A leaf whose buffer may be gone: any use of its value opens the window first."""

    @property
    def dtype(self) -> torch.dtype:
        """What the code expects."""
        return self._expected

    @property
    def data(self) -> Tensor:
        """The whole value without gradient, after the window has opened."""
        if not self._is_exact:
            return self._resting.data
        _open(self, torch.Tensor.detach)
        return cast(Tensor, cast(Any, WholeParameter.data).__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        self._resting.data = value

    def __repr__(self) -> str:
        return f"ConcealedParameter({self._resting!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.detach and reads_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _handles_state(func):
            args, kwargs = tree_map_only(
                ConcealedParameter, lambda leaf: leaf if leaf._is_exact else leaf._resting, (args, kwargs)
            )
        first = next((item for item in tree_leaves((args, kwargs)) if isinstance(item, ConcealedParameter)), None)
        if first is None:
            return func(*args, **kwargs)
        with _owner(first).operating(), torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(ConcealedParameter, lambda leaf: _open(leaf, func), (args, kwargs))
            return func(*args, **kwargs)


def _open(leaf: ConcealedParameter, func: Any) -> Tensor:
    """Open the leaf's window; what ``func`` takes in its place."""
    return _owner(leaf).touch(leaf._index, func)


def _owner(leaf: ConcealedParameter) -> Owner:
    owner = leaf._resting.owner
    if owner is None:
        raise RuntimeError(
            f"`{leaf._resting.slicing.name}` was kept from inside a forward, and its module is no longer sharded."
            " Read the module's own parameter."
        )
    return owner
