"""A checkpoint of either form, looked at and exported by one process that trains nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.checkpoint.directory import is_directory, load_directory
from lightning_zero.checkpoint.file import load_file, save_file
from lightning_zero.checkpoint.stored import CheckpointError, StoredTensor
from lightning_zero.collectives import Collectives

__all__ = ["describe", "export_file", "export_safetensors", "open_checkpoint"]


def open_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint at ``path``; tensors are read when they are used, objects without running what they ask for.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged, incomplete, or no checkpoint.
    """
    checkpoint = load_directory(path, True) if is_directory(path) else load_file(path, True)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"`{path}` holds a {type(checkpoint).__name__}, and no checkpoint.")
    # Files that others wrote whole may be weights alone.
    return checkpoint if "state_dict" in checkpoint else {"state_dict": checkpoint}


def describe(path: Path) -> str:
    """What is in the checkpoint at ``path``: names, shapes, dtypes, bytes, and what wrote it."""
    checkpoint = open_checkpoint(path)
    form = "one file"
    if is_directory(path):
        ranks = {file.name.split("_")[2] for file in path.glob("__*_*.distcp")}
        form = f"a directory, written by {len(ranks)} ranks"
    lines = [f"{path}: {form}"]
    for key in ("pytorch-lightning_version", "epoch", "global_step"):
        if key in checkpoint:
            lines.append(f"{key}: {checkpoint[key]}")
    weights = [(name, value) for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)]
    width = max((len(name) for name, _ in weights), default=0)
    for name, value in weights:
        shape, dtype = "x".join(map(str, value.shape)) or "scalar", str(value.dtype).removeprefix("torch.")
        lines.append(f"{name:<{width}}  {shape:>16}  {dtype:>9}  {value.nbytes:>15,} bytes")
    lines.append(
        f"weights: {len(weights)} tensors, {_nbytes(dict(weights)):,} bytes, names of a tied weight each counted"
    )
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        lines.append(f"optimizer {number}: {len(state['state'])} parameters, {_nbytes(state['state']):,} bytes")
    return "\n".join(lines)


def _nbytes(tree: Any) -> int:
    return sum(value.nbytes for value in tree_leaves(tree) if isinstance(value, Tensor))


def export_file(source: Path, out: Path) -> None:
    """Write the checkpoint at ``source`` as one ordinary file.

    What is read goes to files beside ``out`` first, so the process holds no more than one tensor.

    Raises:
        CheckpointError: ``source`` cannot be read, or ``out`` not be written.
    """
    checkpoint = open_checkpoint(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as scratch:
        place = iter(range(1 << 62))

        def mapped(value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            if not value.numel():
                return torch.empty(value.shape, dtype=value.dtype)
            file = f"{scratch}/{next(place)}"
            whole = torch.from_file(file, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
            value.read_into(whole)
            return whole

        save_file(tree_map(mapped, checkpoint), out, Collectives(None, torch.device("cpu")))


def export_safetensors(source: Path, folder: Path, prefix: str | None = None, shard_bytes: int = 5 * 10**9) -> str:
    """Write the weights of the checkpoint at ``source`` to ``folder`` as Hugging Face lays them out.

    Args:
        prefix: the part of the module that is exported, as "model."; default: the first part of their names, if it is
            that of all weights, as it is where a LightningModule holds one model.
        shard_bytes: most bytes of a file, of which one is in memory at a time.

    Returns:
        the prefix, which names in ``folder`` do not have.

    Raises:
        CheckpointError: ``source`` cannot be read, or has no such names.
        ImportError: ``safetensors`` is not installed.
    """
    from safetensors.torch import save_file as save_safetensors

    weights = {n: v for n, v in open_checkpoint(source)["state_dict"].items() if isinstance(v, Tensor)}
    if prefix is None:
        firsts = (
            {name.partition(".")[0] for name in weights if "." in name} if all("." in n for n in weights) else set()
        )
        prefix = f"{firsts.pop()}." if len(firsts) == 1 else ""
    weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not weights:
        raise CheckpointError(f"`{source}` has no weight whose name begins with {prefix!r}.")
    files = list(_in_files(weights, shard_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    # Of an export before this one nothing may be left that a reader would take for a part of it.
    for stale in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
        stale.unlink(missing_ok=True)
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        save_safetensors({key: weights[key].clone().contiguous() for key in names}, folder / name, {"format": "pt"})
        index |= dict.fromkeys(names, name)
    if len(files) > 1:
        total = {"metadata": {"total_size": _nbytes(weights)}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(total, indent=2) + "\n")
    return prefix


def _in_files(weights: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for name, value in weights.items():
        if names and nbytes + value.nbytes > shard_bytes:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += value.nbytes
    if names:
        yield names
