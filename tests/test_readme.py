"""The README's code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning_pytorch
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class AnyModule(lightning_pytorch.LightningModule):
    """What `any_lightning_module` stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_code_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but for the hardware: the README says itself what a laptop types."""
    monkeypatch.chdir(tmp_path)
    block = block.replace(
        'accelerator="gpu", devices=8, strategy="zero3"',
        'accelerator="cpu", devices=2, strategy="zero3_fork", max_epochs=1',
    )
    data = DataLoader(torch.randn(4, 2))  # type: ignore[arg-type]
    exec(compile(block, "README.md", "exec"), {"any_lightning_module": AnyModule(), "datamodule": data})


def test_the_readme_has_code() -> None:
    """Else the test above would pass on nothing."""
    assert len(BLOCKS) >= 4
