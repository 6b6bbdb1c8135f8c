"""A checkpoint as one ordinary file, on a local disk: written and read in the memory of one tensor more.

write    straight into the file, which takes its name when it is complete
read     mapped: a rank takes from the pages what it keeps, and ranks of one host share them
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.first_rank import on_first_rank
from lightning_zero.checkpoint.replacing import discard, flush, part_of, require_place, take_place
from lightning_zero.checkpoint.stored import CheckpointError
from lightning_zero.collectives import Collectives

__all__ = ["load_file", "save_file"]


def save_file(checkpoint: Mapping[str, Any], path: str | Path, collectives: Collectives) -> None:
    """Have rank 0 write ``checkpoint`` as the file ``path``: a collective.

    Raises:
        CheckpointError: on every rank, if it cannot; a checkpoint that was there is as it was.
    """
    path = Path(path)
    part = part_of(path)

    def write() -> None:
        require_place(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        discard(part)
        torch.save(dict(checkpoint), part)
        flush(part)
        take_place(part, path)

    try:
        on_first_rank(collectives, write)
    except Exception as error:
        if collectives.rank == 0:
            with suppress(OSError):
                discard(part)
        raise CheckpointError(
            f"the checkpoint `{path}` was not written: {error}. One that was there before is as it was."
        ) from error


def load_file(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint in the file ``path``; tensors lie in its pages until someone writes into them.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged, or no checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if path.is_dir():
        raise CheckpointError(
            f"`{path}` is a directory without checkpoint: it has no `.metadata`. It holds"
            f" {sorted(found.name for found in path.iterdir())[:5]}. Name the checkpoint itself."
        )
    try:
        # Files of torch before 1.6, and what pickle alone wrote, cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only)
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        if mapped and isinstance(error, pickle.UnpicklingError):
            raise  # a whole file with objects in it: torch says how to allow them
        raise CheckpointError(f"`{path}` cannot be read, or is damaged: {error}") from error
    return loaded
