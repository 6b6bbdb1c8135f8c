"""What every test finds: one thread, and the default dtype of its file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """A twin that computes in this process may change it for itself."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
