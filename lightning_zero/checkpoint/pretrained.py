"""Weights of Hugging Face folders, read once and not once a rank.

configure_model             from_pretrained on rank 0      ->  the others build the same model on ``meta``
load_pretrained, before     rank 0 reads                   ->  the others stay on ``meta``
shard                       rank 0's values, unit by unit  ->  shards on every rank
load_pretrained, after      every rank reads its part of each tensor
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_zero.checkpoint.stored import CheckpointError
from lightning_zero.collectives import Collectives
from lightning_zero.pieces import own_boxes, piece_at
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["from_pretrained_once", "load_pretrained"]


def load_pretrained(module: nn.Module, folder: str | Path, strict: bool = True) -> None:
    """Read the ``safetensors`` of ``folder`` into ``module``, plain or sharded.

    A sharded parameter takes its fragment from the file, on every rank. In a plain module that is to be sharded rank 0
    alone reads, where several ranks are: its values are everyone's, and parameters of the others stay on ``meta``.

    Args:
        module: names of its `state_dict` are those in the files; parameters may be on ``meta``.
        folder: holds ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        strict: whether each name must be on both sides; the second name of a tied weight need not be in the files.

    Raises:
        FileNotFoundError: ``folder`` holds neither.
        CheckpointError: names or shapes differ; nothing was read.
        ImportError: ``safetensors`` is not installed.
    """
    from safetensors import safe_open

    with ExitStack() as files:
        stored = {
            name: file
            for path in _files_in(Path(folder))
            for file in [files.enter_context(safe_open(path, framework="pt"))]
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
        }
        places = dict(module.named_parameters(remove_duplicate=False)) | _persistent_buffers(module)
        _require_names(places, stored, strict, Path(folder))
        for name, place in places.items():
            if name in stored:
                found = tuple(stored[name].get_slice(name).get_shape())
                if found != tuple(place.shape):
                    raise CheckpointError(
                        f"`{name}` in `{folder}` has shape {found}, and in `{type(module).__name__}`"
                        f" {tuple(place.shape)}. Build the model as the one that was saved."
                    )
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        done: set[int] = set()
        members = _members(module)
        for name, place in places.items():
            if name not in stored or id(place) in done:
                continue
            done.add(id(place))
            if isinstance(place, ShardedTensor):
                _read_fragment(place, stored[name], name)
            elif not place.is_meta:
                with torch.no_grad():
                    place.copy_(stored[name].get_tensor(name))
            elif rank == 0:
                _give_values(members[id(place)], place, stored[name].get_tensor(name).to(place.dtype))
        if rank == 0:
            _initialize_buffers(module)


def _files_in(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise FileNotFoundError(
        f"`{folder}` holds neither model.safetensors nor model.safetensors.index.json. Name the folder that"
        " `save_pretrained` wrote."
    )


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def _require_names(places: dict[str, Tensor], stored: dict[str, Any], strict: bool, folder: Path) -> None:
    reached = {id(places[name]) for name in stored if name in places}
    missing = sorted(name for name, place in places.items() if id(place) not in reached)
    unknown = sorted(name for name in stored if name not in places)
    if strict and (missing or unknown):
        raise CheckpointError(
            f"`{folder}` lacks {missing[:5]} and has {unknown[:5]} besides, {len(missing)} and {len(unknown)} names."
            " Give the part of the module that was saved, as `load_pretrained(self.model, folder)`; where Hugging Face"
            " renames weights as it loads them, call `from_pretrained` in `configure_model`."
        )


def _read_fragment(place: ShardedTensor, file: Any, name: str) -> None:
    with place.writing():
        for box in own_boxes(place.slicing):
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
            piece = file.get_slice(name)[part] if part else file.get_tensor(name)
            piece_at(MetadataIndex(name, torch.Size(box.offsets)), place.slicing, place.fragment).copy_(piece)


def _members(module: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Where each parameter and buffer is: tied ones are in several places."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in module.modules():
        kept: Any
        for kept in (part._parameters, part._buffers):
            for attribute, member in kept.items():
                if member is not None:
                    found.setdefault(id(member), []).append((kept, attribute))
    return found


def _give_values(members: list[tuple[dict[str, Any], str]], place: Tensor, value: Tensor) -> None:
    """``value`` wherever ``place``, which has none, is."""
    filled = nn.Parameter(value, place.requires_grad) if isinstance(place, nn.Parameter) else value
    for kept, attribute in members:
        kept[attribute] = filled


def _initialize_buffers(module: nn.Module) -> None:
    """Compute what is in no file, as the angles of rotary embeddings, where a model on ``meta`` has nothing.

    Raises:
        CheckpointError: nobody knows how.
    """
    for prefix, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is None or not buffer.is_meta:
                continue
            part._buffers[name] = torch.full(buffer.shape, _unset(buffer.dtype), dtype=buffer.dtype)
            initialize = _initializer(module, prefix)
            if initialize is not None:
                # It may draw weights of the part anew.
                own = [(value, value.detach().clone()) for value in _values_of(part, name)]
                initialize(part)
                for value, values in own:
                    value.data.copy_(values)
            if _is_unset(part._buffers[name]):
                raise CheckpointError(
                    f"the buffer `{prefix}.{name}` is in no file, and on the meta device. Build the model on rank 0"
                    " without `torch.device('meta')`, so that it is computed."
                )


def _values_of(part: nn.Module, but: str) -> list[Tensor]:
    members = (*part._parameters.items(), *part._buffers.items())
    return [value for name, value in members if value is not None and name != but and not value.is_meta]


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unset(buffer: Any) -> bool:
    unset = _unset(buffer.dtype)
    return bool((buffer.isnan() if unset != unset else buffer == unset).any())


def _initializer(module: nn.Module, name: str) -> Any:
    """How the innermost Hugging Face model around the part ``name`` initializes parts."""
    while True:
        found = getattr(module.get_submodule(name), "_init_weights", None)
        if found is not None or not name:
            return found
        name = name.rpartition(".")[0]


# `from_pretrained`, as it is written in `configure_model`


@contextmanager
def from_pretrained_once(collectives: Collectives) -> Iterator[None]:
    """Context in which rank 0 alone loads what `from_pretrained` of a Hugging Face model asks for.

    The others build it from rank 0's configuration, on ``meta``, and call nothing of the hub. It is a collective on all
    ranks, as each call in it is.
    """
    if "transformers" not in sys.modules or collectives.group is None:
        yield
        return
    # Its parts are imported when they are asked for, which may be in `configure_model`.
    transformers: Any = import_module("transformers.modeling_utils")
    kind: Any = transformers.PreTrainedModel
    own = vars(kind)["from_pretrained"]
    inside = [False]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        load = own.__get__(None, cls)
        if inside[0]:  # a model made of models
            return load(*args, **kwargs)
        inside[0] = True
        try:
            return _loaded_once(load, args, kwargs, collectives)
        finally:
            inside[0] = False

    kind.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        kind.from_pretrained = own


_REFUSED = ("device_map", "quantization_config", "tp_plan", "tp_size", "state_dict", "output_loading_info")
"""Arguments with which `from_pretrained` makes, or returns, something else than a plain model on the host."""


def _loaded_once(load: Any, args: Any, kwargs: dict[str, Any], collectives: Collectives) -> Any:
    refused = [name for name in _REFUSED if kwargs.get(name)]
    if refused:
        raise CheckpointError(
            f"`from_pretrained({refused[0]}=...)` in `configure_model` cannot be shared between ranks. Leave it out, or"
            " build the model from its configuration and call `lightning_zero.load_pretrained(self.model, folder)`."
        )
    model: Any = None
    told = b""
    error: Exception | None = None
    try:
        if collectives.rank == 0:
            model = load(*args, **kwargs)
            generation = getattr(model, "generation_config", None)
            told = pickle.dumps((type(model), model.config, generation, model.training, _layout(model)))
    except Exception as caught:
        error = caught
    if collectives.on_any_rank(error is not None):
        raise error or CheckpointError("`from_pretrained` failed on rank 0, which says why.")
    told = collectives.broadcast_object(told)
    try:
        if model is None:
            model = _built_again(told)
    except Exception as caught:
        error = caught
    if collectives.on_any_rank(error is not None):
        raise CheckpointError(
            f"what `from_pretrained` loaded on rank 0 cannot be built from its configuration alone{_because(error)}."
            " Build it yourself, and call `lightning_zero.load_pretrained(self.model, folder)`."
        ) from error
    return model


def _because(error: Exception | None) -> str:
    return f": {error}" if error is not None else " on another rank, which says why"


def _built_again(told: bytes) -> Any:
    """Rank 0's model without its values.

    Raises:
        ValueError: it is another one.
    """
    kind, config, generation, training, layout = pickle.loads(told)
    with torch.device("meta"):
        model = kind._from_config(config)
    if generation is not None:
        model.generation_config = generation
    model.train(training)
    _give_dtypes(model, layout)
    if _layout(model) != layout:
        raise ValueError("names, shapes or ties of parameters and buffers differ")
    return model


def _layout(model: nn.Module) -> list[tuple[Any, ...]]:
    """Names, shapes, dtypes and what is trained, with the first name of each parameter for its other ones."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        (name, first.setdefault(id(value), name), tuple(value.shape), value.dtype, value.requires_grad)
        for name, value in tensors
    ]


def _give_dtypes(model: nn.Module, layout: list[tuple[Any, ...]]) -> None:
    wanted = {name: (dtype, requires_grad) for name, _, _, dtype, requires_grad in layout}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        dtype, requires_grad = wanted.get(name, (value.dtype, value.requires_grad))
        value.data = value.data.to(dtype)
        value.requires_grad_(requires_grad)
