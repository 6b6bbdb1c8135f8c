"""Tensors of global shape that hold one rank's fragment.

    outside: shape (4, 3), float32, requires_grad        what optimizers, hooks and user code see
    inside:  elements [6, 12) of it, a 1-D tensor        what this rank holds and steps

`ShardedTensor` is such a tensor (a gradient, an optimizer's moment), `ShardedParameter` one that a module owns, and
`ShardedView` a view of either: its parent and the chain of view operations. A fragment that rests off the device has a
`Lane`, in which operations on it queue. What torch does to them is decided in
`sharded_ops`; here is what they are, and what reaches them before autograd does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from lightning_zero.lane import Deferred, Lane
from lightning_zero.pieces import chunk_of, own_boxes, piece_at, write_items
from lightning_zero.slicing import Slicing

__all__ = ["Owner", "RawMemoryError", "ShardedParameter", "ShardedTensor", "ShardedView", "Slicing"]

Dispatch = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
_dispatch: Dispatch


def install(dispatch: Dispatch) -> None:
    """Set what runs the operations of sharded tensors; `sharded_ops`, one idea further up, calls this once."""
    global _dispatch
    _dispatch = dispatch


class RawMemoryError(RuntimeError):
    """Code asked for the memory of a tensor of which this rank holds a fragment."""


class NotPicklableError(RawMemoryError, TypeError):
    """It was to be pickled: a `TypeError`, as of all that cannot be, which code that tries looks for."""


class Owner(Protocol):
    """Who keeps a parameter's whole value current."""

    def read(self, index: int) -> Tensor:
        """The whole value in the main dtype, detached; a collective where no whole value rests."""

    def read_local(self, index: int) -> Tensor | None:
        """The whole value if this rank has it without a collective."""

    def read_resting(self, index: int) -> Tensor | None:
        """As `read_local`, on one rank alone: the others are asked for nothing."""

    def touch(self, index: int, func: Any) -> Tensor:
        """What stands for the parameter, with its whole value, in a differentiable ``func``."""

    def gave_back(self, index: int, tensor: Tensor) -> bool:
        """Whether autograd made ``tensor``, which requires a gradient, of a saved parameter: it stands for that one."""

    @property
    def computes_apart(self) -> bool:
        """Whether code computes in another dtype than rests here: it meets the main weight where it keeps state."""

    def operating(self) -> AbstractContextManager[Any]:
        """Context of one operation: what is touched inside stays whole to its end, and is saved as a place."""

    def before_write(self) -> None:
        """Called before a fragment changes: nobody may still be sending it."""

    def after_write(self, indices: Sequence[int]) -> None:
        """Called after fragments changed: whole copies are stale."""

    def get_grad(self, index: int) -> Tensor | None:
        """The mean gradient, as a `ShardedTensor`."""

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """Replace the gradient; ``None`` also drops what was not reduced yet."""

    def trained_changed(self, index: int) -> None:
        """``requires_grad`` was set on the resting parameter."""

    def hook_grad(self, index: int, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with each local gradient; returns torch's handle."""

    def hook_accumulated(self, index: int, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with the parameter after its mean gradient has changed; returns torch's handle."""


# Torch's own attributes, past the properties of the classes here.
_raw_grad = cast(Any, torch.Tensor.grad)
_raw_requires_grad = cast(Any, torch.Tensor.requires_grad)


OWN_ATTRIBUTES = {"_fragment", "_slicing", "_owner", "_index", "_lane"}
"""Of a sharded parameter; other ones are the user's."""


def _refuse(name: str, action: str, kind: type[RawMemoryError] = RawMemoryError) -> NoReturn:
    raise kind(
        f"`{name}` is sharded: this rank holds a fragment, so {action} has no memory to read."
        " Read it whole on every rank: `with lightning_zero.gathered(module): ...`. A Hugging Face model is written by"
        " all ranks together: `lightning_zero.save_pretrained(module, folder)`."
    )


def _wrapper(cls: type[Tensor], shape: torch.Size, **geometry: Any) -> Any:
    """A tensor without memory. Never one of inference mode, which torch would refuse as a view of a parameter."""
    if not torch.is_inference_mode_enabled():
        return torch.Tensor._make_wrapper_subclass(cls, shape, **geometry)
    with torch.inference_mode(False):
        return torch.Tensor._make_wrapper_subclass(cls, shape, **geometry)


class ShardedTensor(torch.Tensor):
    """A tensor of global shape that holds this rank's fragment; outside a parameter it has no owner."""

    _fragment: Tensor | Deferred
    _slicing: Slicing
    _owner: weakref.ref[Owner] | None
    _index: int
    _lane: Lane | None

    @staticmethod
    def __new__(
        cls: type[ShardedTensor],
        fragment: Tensor | Deferred,
        slicing: Slicing,
        requires_grad: bool = False,
        owner: weakref.ref[Owner] | None = None,
        index: int = -1,
        lane: Lane | None = None,
    ) -> ShardedTensor:
        self: ShardedTensor = _wrapper(
            cls,
            slicing.shape,
            strides=slicing.stride,
            dtype=fragment.dtype,
            device=fragment.device,
            requires_grad=requires_grad,
        )
        self._fragment = fragment
        self._slicing = slicing
        self._owner = owner
        self._index = index
        self._lane = lane
        return self

    @property
    def fragment(self) -> Tensor:
        """This rank's elements, shape (n,), in storage order; empty where the tensor lies on other ranks."""
        if self._lane is not None:
            self._lane.wait()
        if isinstance(self._fragment, Deferred):
            assert self._fragment.value is not None
            self._fragment = self._fragment.value
        return self._fragment

    @property
    def handle(self) -> Tensor | Deferred:
        """The fragment as an operation in its lane takes it: what was queued before may still change it."""
        return self._fragment

    @property
    def lane(self) -> Lane | None:
        """Where operations on the fragment queue, if it rests off the device."""
        return self._lane

    @property
    def slicing(self) -> Slicing:
        """How the tensor is cut."""
        return self._slicing

    @property
    def owner(self) -> Owner | None:
        """Who keeps the whole value, while it lives."""
        return None if self._owner is None else self._owner()

    def whole(self) -> Tensor:
        """The whole value, detached: a collective on all ranks, unless this rank has it at hand."""
        owner = self.owner
        value = self._slicing.assemble(self.fragment) if owner is None else owner.read(self._index)
        if self._lane is None:
            return value
        self._lane.relax()
        return value.to(self.device)

    def whole_on_first(self) -> Tensor | None:
        """The whole main value on rank 0, in memory of its own, and ``None`` on the others: a collective."""
        value = self._slicing.assemble_on_first(self.fragment)
        if self._lane is not None:
            self._lane.relax()
        return value

    def local_whole(self) -> Tensor | None:
        """The whole value if no collective is needed for it."""
        owner = self.owner
        value = None if owner is None else owner.read_local(self._index)
        if value is None and self._slicing.replicated:
            value = self._slicing.shape_up(self.fragment)
        return value

    def whole_here(self) -> Tensor | None:
        """The whole value, in memory that is not to be written, if this rank alone can tell it."""
        owner = self.owner
        value = None if owner is None else owner.read_resting(self._index)
        if value is None and self._slicing.replicated:
            value = self._slicing.shape_up(self.fragment).detach()
        return value

    def alias(self) -> ShardedTensor:
        """The same fragment of the same owner without gradient: what ``detach()`` and ``data`` give."""
        return ShardedTensor(self._fragment, self._slicing, owner=self._owner, index=self._index, lane=self._lane)

    def like(self, fragment: Tensor | Deferred) -> ShardedTensor:
        """A tensor that is cut, and rests, as this one does."""
        return ShardedTensor(fragment, self._slicing, lane=self._lane)

    def kept(self, fragment: Tensor) -> ShardedTensor:
        """A tensor like this one of a copy of ``fragment``, which is to be kept: it rests where this one does."""
        return self.like(self._room(fragment.dtype).copy_(fragment))

    def empty_kept(self, dtype: torch.dtype) -> ShardedTensor:
        """As `kept`, with arbitrary values."""
        return self.like(self._room(dtype))

    def _room(self, dtype: torch.dtype) -> Tensor:
        numel = self._slicing.own.numel
        if self._lane is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._lane.allocate(numel, dtype)

    # The protocol of torch.distributed.checkpoint: files hold the whole tensor in pieces, whoever has them.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return write_items(fqn, self._slicing, self.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # A load plans with this, and then writes into the pieces past every operation of the tensor.
        with self.writing():
            return [chunk_of(box) for box in own_boxes(self._slicing)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return piece_at(index, self._slicing, self.fragment)

    def store(self, whole: Tensor) -> None:
        """Make ``whole`` the value: this rank keeps its fragment."""
        with self.writing():
            self.fragment.copy_(self._slicing.cut(whole))

    def writing(self) -> _Writing:
        """Context of every in-place change of the fragment."""
        return _Writing((self,))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_leaves(func, args, kwargs):
            owner = next(_owners(args, kwargs), None)
            if owner is not None:
                with owner.operating(), torch._C.DisableTorchFunctionSubclass():
                    leaves = {key: _touch(value, func) for key, value in kwargs.items()}
                    return func(*[_touch(value, func) for value in args], **leaves)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        copied = type(self)(self.kept(self.fragment).fragment, self._slicing, self.requires_grad, lane=self._lane)
        memo[id(self)] = copied
        grad = self.grad if isinstance(self, ShardedParameter) else None
        if grad is not None:
            copied.grad = grad.clone()
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        own = self._slicing.own
        return (
            f"{type(self).__name__}({self._slicing.name!r}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" elements [{own.start}, {own.stop}) here)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.whole_here()
        if value is None:
            _refuse(self._slicing.name, "pickling", NotPicklableError)
        # A file must open where this package is not installed; a view would drag its whole buffer into it.
        return value.clone().__reduce_ex__(protocol)

    def data_ptr(self) -> NoReturn:
        """Raises `RawMemoryError`."""
        _refuse(self._slicing.name, "`data_ptr()`")

    def untyped_storage(self) -> NoReturn:
        """Raises `RawMemoryError`."""
        _refuse(self._slicing.name, "`untyped_storage()`")

    def storage(self) -> NoReturn:
        """Raises `RawMemoryError`."""
        _refuse(self._slicing.name, "`storage()`")

    def numpy(self, *, force: bool = False) -> Any:
        """The whole value, not to be written, if it rests here.

        Raises:
            RawMemoryError: it does not.
        """
        return _read_only(self.whole_here(), self._slicing.name, self.requires_grad, force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def is_shared(self) -> bool:
        """No other process maps this memory."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """Nobody copies from this tensor's memory."""
        return False

    def tolist(self) -> Any:
        """The whole value as nested lists: a collective on all ranks."""
        return self.whole().tolist()

    @property
    def data(self) -> Tensor:
        """The same fragment without gradient; assigning a tensor of global shape writes it."""
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        # What moves nothing, as `module.to(device)`, assigns a parameter to itself.
        if isinstance(value, ShardedTensor) and value._fragment is self._fragment:
            return
        check_data(self, value)
        with torch.no_grad():
            self.copy_(value)


def _read_only(whole: Tensor | None, name: str, requires_grad: bool, force: bool) -> Any:
    """``whole`` as an array: what is written into it would reach no fragment."""
    if requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    if whole is None:
        _refuse(name, "`numpy()`")
    array = whole.numpy(force=force)
    array.flags.writeable = False
    return array


def check_data(tensor: ShardedTensor, value: Tensor) -> None:
    """See that ``tensor.data = value`` changes values alone.

    Raises:
        ValueError: shape, dtype or kind of device differ.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype or value.device.type != tensor.device.type:
        raise ValueError(
            f"`{tensor.slicing.name}.data` is sharded as {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; it"
            f" cannot become {tuple(value.shape)} {value.dtype} on {value.device}."
            " Convert the module before it is sharded."
        )


class ShardedParameter(ShardedTensor):
    """A parameter at rest: an ``nn.Parameter`` to ``isinstance``, with the parameter's global geometry.

    Its gradient is this rank's fragment of the mean over ranks. Using it in a differentiable operation opens its
    owner's window, and the whole value takes part.
    """

    _is_param = True

    @property
    def grad(self) -> Tensor | None:
        """The mean gradient over ranks, or ``None``."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            return owner.get_grad(self._index)
        with torch._C.DisableTorchFunctionSubclass():
            return cast("Tensor | None", _raw_grad.__get__(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            value = self._as_gradient(value)
        owner = self.owner
        if owner is not None:
            owner.set_grad(self._index, value)
            return
        with torch._C.DisableTorchFunctionSubclass():
            _raw_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; a window that is open follows."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(_raw_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _raw_requires_grad.__set__(self, value)
        owner = self.owner
        if owner is not None:
            owner.trained_changed(self._index)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Set ``requires_grad``."""
        self.requires_grad = requires_grad
        return self

    def _as_gradient(self, value: Tensor) -> Tensor:
        if value.shape != self.shape:
            raise ValueError(
                f"`{self._slicing.name}.grad` must have the parameter's shape {tuple(self.shape)}, not"
                f" {tuple(value.shape)}."
            )
        if isinstance(value, ShardedTensor) and value.slicing is self._slicing:
            return value
        whole = value.whole() if isinstance(value, ShardedTensor | ShardedView) else value.detach()
        return self.kept(self._slicing.cut(whole.to(self.dtype)))

    def plain(self, whole: Tensor) -> nn.Parameter:
        """An ordinary parameter of the value ``whole``, with what user code noted on this one."""
        found = nn.Parameter(whole, requires_grad=self.requires_grad)
        found.__dict__.update({key: value for key, value in self.__dict__.items() if key not in OWN_ATTRIBUTES})
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.whole_here()
        if value is None:
            _refuse(self._slicing.name, "pickling", NotPicklableError)
        return self.plain(value.clone()).__reduce_ex__(protocol)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with each local gradient, whole and before it is reduced, as under data parallelism."""
        owner = self.owner
        return super().register_hook(hook) if owner is None else owner.hook_grad(self._index, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter at the end of each backward that changed its mean gradient."""
        owner = self.owner
        if owner is None:
            return super().register_post_accumulate_grad_hook(hook)
        return owner.hook_accumulated(self._index, hook)


class ShardedView(torch.Tensor):
    """A view of a sharded tensor: reading replays it on the whole, writing folds this rank's part back.

    Args:
        base: the viewed tensor.
        replay: applies the chain of view operations to a whole tensor of ``base``'s geometry.
    """

    _base_tensor: ShardedTensor
    _replay: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(cls: type[ShardedView], base: ShardedTensor, replay: Callable[[Tensor], Tensor]) -> ShardedView:
        slicing = base.slicing
        like = replay(torch.empty_strided(slicing.shape, slicing.stride, dtype=base.dtype, device="meta"))
        self: ShardedView = _wrapper(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=base.device,
        )
        self._base_tensor = base
        self._replay = replay
        return self

    @property
    def base(self) -> ShardedTensor:
        """The sharded tensor that is viewed."""
        return self._base_tensor

    def view_of(self, whole: Tensor) -> Tensor:
        """The same view of ``whole``, a tensor of the base's geometry."""
        return self._replay(whole)

    def whole(self) -> Tensor:
        """The viewed values: a collective on all ranks, unless this rank has them at hand."""
        return self.view_of(self._base_tensor.whole())

    def is_shared(self) -> bool:
        """As of the viewed tensor."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """As of the viewed tensor."""
        return False

    @property
    def data(self) -> Tensor:
        """The same view without gradient."""
        return self.detach()

    # Where code computes apart from what rests, it meets the view of that.
    __torch_function__ = ShardedTensor.__torch_function__

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedView(shape={tuple(self.shape)}, of {self._base_tensor!r})"

    def _whole_here(self) -> Tensor | None:
        whole = self._base_tensor.whole_here()
        return None if whole is None else self.view_of(whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self._whole_here()
        if value is None:
            _refuse(self._base_tensor.slicing.name, "pickling a view", NotPicklableError)
        return value.clone().__reduce_ex__(protocol)

    def data_ptr(self) -> NoReturn:
        """Raises `RawMemoryError`."""
        _refuse(self._base_tensor.slicing.name, "`data_ptr()` of a view")

    def numpy(self, *, force: bool = False) -> Any:
        """As of a sharded tensor."""
        return _read_only(self._whole_here(), self._base_tensor.slicing.name, self.requires_grad, force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)


class _Writing:
    """Announces a change of fragments to their owners, before and after."""

    def __init__(self, tensors: Iterable[ShardedTensor]) -> None:
        self._written: dict[Owner, list[int]] = {}
        for tensor in tensors:
            owner = tensor.owner
            if owner is not None:
                self._written.setdefault(owner, []).append(tensor._index)

    def __enter__(self) -> None:
        for owner in self._written:
            owner.before_write()

    def __exit__(self, *exc: object) -> None:
        for owner, indices in self._written.items():
            owner.after_write(indices)


def writing(tensors: Iterable[ShardedTensor]) -> _Writing:
    """Context of an in-place change of several fragments at once."""
    return _Writing(tensors)


_VIEW_GETTERS = {"T", "mT", "H", "mH", "real", "imag"}

_METADATA = {
    "size", "dim", "numel", "nelement", "stride", "ndimension", "element_size", "storage_offset", "is_floating_point",
    "is_complex", "is_contiguous", "is_conj", "is_neg", "is_inference", "is_set_to", "is_pinned", "is_same_size",
    "get_device", "type", "has_names", "__len__", "__hash__", "dim_order", "detach", "requires_grad_", "retain_grad",
    "register_hook", "register_post_accumulate_grad_hook", "zeros_like", "ones_like", "empty_like", "full_like",
    "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "is_shared",
    "_has_compatible_shallow_copy_type", "_use_count", "is_distributed", "result_type",
    "can_cast", "promote_types", "get_gradient_edge", "_is_view", "_is_zerotensor",
}  # fmt: skip


def reads_metadata(func: Any) -> bool:
    """Whether ``func`` needs no value, so that grad mode does not make it a touch."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") not in _VIEW_GETTERS
    return name in _METADATA


def writes_in_place(func: Any) -> bool:
    """Whether ``func`` changes its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name[:3] == "__i"


# They ask a graph for gradients of tensors, in whatever mode.
GRADIENT_REQUESTS = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


_VIEWS = {
    "T", "mT", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "view", "view_as",
    "unflatten", "unsqueeze", "squeeze", "expand", "expand_as", "__getitem__", "select", "narrow", "chunk", "split",
    "unbind", "tensor_split", "diagonal", "reshape", "reshape_as", "flatten", "ravel",
}  # fmt: skip
"""What user code may write through."""

_COPIES = {"clone", "to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "__deepcopy__"}


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    recursive=False, reason="a weight at rest is gathered here; `fullgraph=True` is for single blocks"
)
def _needs_leaves(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether what stands for whole values must take the place of resting parameters in ``func``."""
    if _takes_part_in_a_graph(func, args):
        return True
    if torch.is_grad_enabled() or not _computes(func, args):
        return False
    return any(owner.computes_apart for owner in _owners(args, kwargs))


def _takes_part_in_a_graph(func: Any, args: Sequence[Any]) -> bool:
    """Whether autograd must meet leaves in the place of resting parameters."""
    if func in GRADIENT_REQUESTS:
        return True
    if not torch.is_grad_enabled() or reads_metadata(func) or getattr(func, "__name__", "") == "equal":
        return False
    return not _writes_frozen(func, args)


def _computes(func: Any, args: Sequence[Any]) -> bool:
    """Whether ``func`` goes on with values, as a forward does, in place of keeping, writing or looking into state."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
    if name == "equal" or name in _COPIES or name.startswith(("_foreach_", "_fused_")) or reads_metadata(func):
        return False
    if writes_in_place(func):
        # Into an activation, not into a copy or an average that has room for every digit.
        return bool(args) and type(args[0]) is Tensor and args[0].itemsize == 2
    if name not in _VIEWS:
        return True
    # A lookup gives a copy; so may a change of shape, of a view.
    looks_up = name == "__getitem__" and any(map(_is_list, args[1] if type(args[1]) is tuple else args[1:]))
    return looks_up or (name in ("reshape", "reshape_as", "flatten", "ravel") and isinstance(args[0], ShardedView))


def _is_list(index: Any) -> bool:
    return isinstance(index, Tensor | list)


def _writes_frozen(func: Any, args: Sequence[Any]) -> bool:
    """Whether ``func`` changes a sharded tensor that needs no gradient, which is legal under grad mode too."""
    return bool(writes_in_place(func) and args and isinstance(args[0], ShardedTensor) and not args[0].requires_grad)


def _toucher(value: Any) -> Owner | None:
    """The owner of a parameter, in person or as autograd gives it back to who saved it for a backward."""
    if not isinstance(value, ShardedTensor) or value._owner is None:
        return None
    owner = value._owner()
    if owner is None or isinstance(value, ShardedParameter):
        return owner
    with torch._C.DisableTorchFunctionSubclass():
        given_back = _raw_requires_grad.__get__(value) and owner.gave_back(value._index, value)
    return owner if given_back else None


def _owners(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Owner]:
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            owner = _apart(item.base) if isinstance(item, ShardedView) else _toucher(item)
            if owner is not None:
                yield owner


def _apart(base: ShardedTensor) -> Owner | None:
    """The owner of a parameter at rest whose views compute in another dtype than rests."""
    owner = base.owner if isinstance(base, ShardedParameter) else None
    return owner if owner is not None and owner.computes_apart else None


def _touch(value: Any, func: Any) -> Any:
    """``value`` with each owned parameter replaced by what stands for its whole value in ``func``."""
    if isinstance(value, ShardedTensor):
        owner = _toucher(value)
        return value if owner is None else owner.touch(value._index, func)
    if isinstance(value, ShardedView):
        owner = _apart(value.base)
        # It was made without a graph.
        return value if owner is None else value.view_of(owner.touch(value.base._index, func)).detach()
    if type(value) in (list, tuple) and any(isinstance(item, ShardedTensor | ShardedView) for item in value):
        return type(value)([_touch(item, func) for item in value])
    return value
