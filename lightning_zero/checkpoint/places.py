"""Where a checkpoint that is a directory lies: on a local disk, or on a file system that fsspec reaches, as "s3://".

prepare   ->   every rank writes into the part   ->   complete: the part takes the place's name
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint.replacing import discard, flush, part_name, part_of, require_place, take_place

__all__ = ["META", "Place", "is_local", "place_of"]

_METADATA = ".metadata"
"""Written last: with it a directory is a checkpoint."""

META = "meta.pt"
"""All but tensors."""


class Place(Protocol):
    """A directory by its name, and the part that is written in its stead."""

    def is_complete(self) -> bool:
        """Whether a checkpoint is there."""

    def size(self, name: str) -> int:
        """Bytes of one of its files; -1 where it is missing."""

    def open(self, name: str) -> BinaryIO:
        """One of its files, to read."""

    def reader(self) -> FileSystemReader:
        """Reads tensors of it, and its index once."""

    def prepare(self) -> None:
        """Make room for the part: rank 0 does."""

    def writer(self) -> FileSystemWriter:
        """Writes tensors into the part: on every rank."""

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file of the part, to write."""

    def complete(self) -> None:
        """Give the part the place's name, in place of what has it: rank 0 does, when all have written."""

    def discard_part(self) -> None:
        """Remove the part, where it could not be completed."""


def is_local(path: Any) -> bool:
    """Whether ``path`` is on a local disk; a remote one has a protocol, as "s3://"."""
    return "://" not in str(path)


def place_of(path: Any) -> Place:
    """The place ``path``, a local path or a URL."""
    return _Local(Path(path)) if is_local(path) else _Remote(str(path))


class _Local:
    def __init__(self, path: Path) -> None:
        self.path, self._part = path, part_of(path)

    def __str__(self) -> str:
        return str(self.path)

    def is_complete(self) -> bool:
        return (self.path / _METADATA).is_file()

    def size(self, name: str) -> int:
        file = self.path / name
        return os.path.getsize(file) if file.is_file() else -1

    def open(self, name: str) -> BinaryIO:
        return open(self.path / name, "rb")

    def reader(self) -> FileSystemReader:
        return _LocalReader(self.path)

    def prepare(self) -> None:
        require_place(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        discard(self._part)

    def writer(self) -> FileSystemWriter:
        # Nothing is copied ahead of what is written.
        return FileSystemWriter(self._part, per_thread_copy_ahead=0)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        with open(self._part / name, "wb") as file:
            yield file
        flush(self._part / name)

    def complete(self) -> None:
        flush(self._part)
        take_place(self._part, self.path)

    def discard_part(self) -> None:
        discard(self._part)


class _Remote:
    """Names cannot be exchanged there: where one is taken, for a moment the checkpoint that had it is at ``.old``."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        folder, _, name = self.url.rpartition("/")
        self._part, self._old = f"{folder}/{part_name(name)}", f"{self.url}.old"
        self._files = url_to_fs(self.url)[0]

    def __str__(self) -> str:
        return self.url

    def is_complete(self) -> bool:
        return bool(self._files.isfile(f"{self.url}/{_METADATA}"))

    def size(self, name: str) -> int:
        file = f"{self.url}/{name}"
        return int(self._files.size(file)) if self._files.isfile(file) else -1

    def open(self, name: str) -> BinaryIO:
        return self._files.open(f"{self.url}/{name}", "rb")  # type: ignore[no-any-return]

    def reader(self) -> FileSystemReader:
        return _RemoteReader(self.url)

    def prepare(self) -> None:
        if not self.is_complete() and not self._files.isfile(self.url):
            left = self._names(self.url)
            if not all(name == META or name.endswith(".distcp") for name in left):
                raise IsADirectoryError(f"something else is there. Name a place in it, as '{self.url}/last.ckpt'")
            # A run was killed between two names.
            self._restore()
        self._remove(self._part)

    def writer(self) -> FileSystemWriter:
        return FsspecWriter(self._part, sync_files=False, per_thread_copy_ahead=0)

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        return self._files.open(f"{self._part}/{name}", "wb")  # type: ignore[no-any-return]

    def complete(self) -> None:
        if self._files.exists(self.url):
            self._remove(self._old)
            self._files.mv(self.url, self._old, recursive=True)
        try:
            self._files.makedirs(self.url, exist_ok=True)
            for name in sorted(self._names(self._part), key=lambda name: name == _METADATA):
                self._files.mv(f"{self._part}/{name}", f"{self.url}/{name}")
        except Exception:
            self._restore()
            raise
        self._remove(self._part)
        self._remove(self._old)

    def discard_part(self) -> None:
        self._remove(self._part)

    def _restore(self) -> None:
        """Take away what is half there; what was there before it is whole, beside, and has the name again."""
        self._remove(self.url)
        if self._files.exists(self._old):
            self._files.mv(self._old, self.url, recursive=True)

    def _names(self, url: str) -> list[str]:
        if not self._files.exists(url):
            return []
        names = [file.rpartition("/")[2] for file in self._files.ls(url, detail=False)]
        return [name for name in names if name]

    def _remove(self, url: str) -> None:
        if self._files.exists(url):
            self._files.rm(url, recursive=True)


class _ReadsIndexOnce:
    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            self._read = super().read_metadata(*args, **kwargs)  # type: ignore[misc]
        assert self._read is not None
        return self._read


class _LocalReader(_ReadsIndexOnce, FileSystemReader):
    pass


class _RemoteReader(_ReadsIndexOnce, FsspecReader):
    pass
