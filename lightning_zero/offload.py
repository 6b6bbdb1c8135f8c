"""Where training state rests off the device: a target says how memory is taken there, and how values move.

    HostMemory    page-locked host memory
    MappedFile    files that are mapped into memory: the state may be larger than the host's memory

A target is a choice until `open`, and holds resources from then to `close`; each sharded module opens and closes it
once. A further one implements `OffloadTarget.allocate`, and whatever else differs from host memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_zero.host_memory import free_host_bytes

__all__ = ["HostMemory", "MappedFile", "OffloadError", "OffloadTarget", "offload_target"]

_log = logging.getLogger(__name__)


class OffloadError(RuntimeError):
    """State off the device could not be kept, moved or updated."""


@dataclass(kw_only=True)
class OffloadTarget(ABC):
    """What is offloaded, and where it rests.

    Args:
        optimizer: main weights, mean gradients and optimizer state of trained parameters rest here, and are stepped
            here.
        parameters: the shard that is gathered from rests here too, and moves to the device for each gather; frozen
            parameters rest here. For stage 3.
        ratio: the part of the state that is offloaded, by whole units; those that fit beside it stay on the device, the
            first ones first. "auto" offloads what is beyond ``device_budget``.
        device_budget: bytes a rank of device memory that offloadable state may take with ``ratio="auto"``; default:
            half of what is free when the module is sharded.

    Raises:
        ValueError: a field makes no sense, or nothing would be offloaded.
    """

    optimizer: bool = True
    parameters: bool = False
    ratio: float | Literal["auto"] = 1.0
    device_budget: int | None = None

    def __post_init__(self) -> None:
        if not (self.optimizer or self.parameters):
            raise ValueError(
                f"{type(self).__name__}(optimizer=False, parameters=False) offloads nothing. Write `offload=None`."
            )
        if self.ratio != "auto" and not (isinstance(self.ratio, int | float) and 0 < self.ratio <= 1):
            raise ValueError(f"ratio={self.ratio!r} must be above 0 and at most 1, or 'auto'. Write `ratio=0.5`.")
        if self.device_budget is not None and (self.ratio != "auto" or self.device_budget < 0):
            raise ValueError(
                f"device_budget={self.device_budget!r} is the bytes that ratio='auto' fills. Write"
                " `ratio='auto', device_budget=40 * 10**9`."
            )

    def open(self, device: torch.device) -> None:  # noqa: B027
        """Be ready to exchange values with ``device``."""

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        """Memory for ``numel`` elements, shape (numel,), on the CPU, with arbitrary content.

        Args:
            moves: whether values go from here to the device or come from there; else they only rest.

        Raises:
            OffloadError: there is no room, with what to do.
        """

    def to_device(self, out: Tensor, resting: Tensor) -> None:
        """Begin to copy ``resting``, which `allocate` gave, to ``out`` on the device, in the order of its stream."""
        out.copy_(resting, non_blocking=True)

    def to_rest(self, resting: Tensor, value: Tensor) -> None:
        """Begin to copy ``value`` from the device to ``resting``, in the order of the device's current stream."""
        resting.copy_(value, non_blocking=True)

    def relax(self, resting: Tensor) -> None:  # noqa: B027
        """Note that ``resting``, which `allocate` gave, is not needed for a while; its values stay."""

    def free_bytes(self) -> int | None:
        """Bytes that all ranks of this host can still allocate here; ``None`` where the system does not tell."""
        return free_host_bytes()

    def close(self) -> None:  # noqa: B027
        """Let go of what `open` and `allocate` took, but for tensors that someone still refers to."""


@dataclass(kw_only=True)
class HostMemory(OffloadTarget):
    """State rests in host memory.

    Args:
        pin_memory: page-lock what moves, so that it is copied beside the computation. Where the system refuses, it
            stays pageable, with a warning.
    """

    pin_memory: bool = True
    _device: torch.device = field(default=torch.device("cpu"), init=False, repr=False, compare=False)
    _locked: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _users: int = field(default=0, init=False, repr=False, compare=False)

    def open(self, device: torch.device) -> None:
        self._device = device
        self._users += 1

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        if moves and numel and self.pin_memory and self._device.type != "cpu":
            self._lock(tensor)
        return tensor

    def _lock(self, tensor: Tensor) -> None:
        # Registered, not torch's own pinned memory: that rounds each buffer up to a power of two, up to twice its size.
        error = page_lock(tensor)
        if error is None:
            self._locked.append(tensor)
            return
        self.pin_memory = False
        _log.warning(
            "The system refuses to page-lock host memory (%s), so it stays pageable, and copies to the device are"
            " slower. Raise the limit (`ulimit -l unlimited`), or say `HostMemory(pin_memory=False)`.",
            error,
        )

    def close(self) -> None:
        self._users -= 1
        if self._users == 0:
            locked, self._locked = self._locked, []
            for tensor in locked:
                page_unlock(tensor)


def page_lock(tensor: Tensor) -> str | None:
    """Lock the pages of ``tensor`` in memory for copies by the device; why not, where the system refuses."""
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(status) == 0:
        return None
    with suppress(RuntimeError):
        # The runtime keeps the error for whoever asks next: the first kernel that torch launches, and nobody after it.
        torch.ones(1, device="cuda")
    return str(status)


def page_unlock(tensor: Tensor) -> None:
    """The inverse of `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


@dataclass
class MappedFile(OffloadTarget):
    """State rests in files that are mapped into memory. What is not worked on takes no memory of the process.

    Files have no name: two runs share a directory without knowing of each other, and however a run ends nothing of it
    is left there.

    Args:
        directory: on a local disk, where the files are; default: the working directory.

    Raises:
        OffloadError: the directory cannot be written, or the system has no such files.
    """

    directory: str | os.PathLike[str] = "."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not sys.platform.startswith("linux"):
            raise OffloadError(
                "MappedFile needs Linux's nameless files. Write `offload='cpu'`, or `HostMemory(ratio=0.5)`."
            )

    def open(self, device: torch.device) -> None:
        self.allocate(1, torch.uint8, moves=False)

    def allocate(self, numel: int, dtype: torch.dtype, moves: bool) -> Tensor:
        nbytes = numel * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                # Room is taken now: a write into a mapped page that the disk has no room for would end the process.
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                path = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except (OSError, RuntimeError) as error:
            raise OffloadError(
                f"{nbytes} bytes of training state cannot be kept in {str(self.directory)!r}: {error}. Name a directory"
                " with room on a local disk: `MappedFile('/path/on/a/disk')`."
            ) from error

    def relax(self, resting: Tensor) -> None:
        # The pages leave the process; the system writes them to the file.
        _advise(resting, _DONT_NEED)

    def free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(Path(self.directory)).free
        except OSError:
            return None  # `open` says what is wrong with it


_DONT_NEED = 4
"""``MADV_DONTNEED``."""


def _advise(resting: Tensor, advice: int) -> None:
    if not resting.nbytes:
        return
    if _libc().madvise(resting.data_ptr(), resting.nbytes, advice):
        raise OffloadError(f"madvise failed: {os.strerror(ctypes.get_errno())}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def offload_target(offload: OffloadTarget | str | None) -> OffloadTarget | None:
    """What ``offload=`` means: ``None``, "cpu", "disk", or a target.

    Raises:
        ValueError: another string.
        TypeError: another object.
    """
    if offload is None or isinstance(offload, OffloadTarget):
        return offload
    if offload == "cpu":
        return HostMemory()
    if offload == "disk":
        return MappedFile()
    if isinstance(offload, str):
        raise ValueError(f"offload={offload!r} is unknown: expected None, 'cpu', 'disk' or an `OffloadTarget`.")
    raise TypeError(
        f"offload={offload!r} is no `OffloadTarget`. Write `offload='cpu'`, `offload=HostMemory(ratio=0.5)`, or derive"
        " a class from `lightning_zero.OffloadTarget`."
    )
