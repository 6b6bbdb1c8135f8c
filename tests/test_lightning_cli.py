"""LightningCLI and its YAML name the strategy by class path, with the arguments that existing projects pass."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_zero import ZeROStrategy

pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI

NAMES = ("stage", "find_unused_parameters", "static_graph", "gradient_as_bucket_view")
VALUES = (2, True, False, True)

YAML = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_zero.ZeROStrategy
    init_args:
      stage: 2
      find_unused_parameters: true
      static_graph: false
      gradient_as_bucket_view: true
"""


class Model(pl.LightningModule):
    """Nothing to train: the command is only parsed, and the Trainer built."""


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where a command line is there beside ``args``."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


def parsed(args: list[str]) -> LightningCLI:
    # Without a seed: it would stay in the environment of the tests that follow.
    return LightningCLI(Model, run=False, args=args, save_config_callback=None, seed_everything_default=False)


def arguments() -> list[str]:
    prefix = "--trainer.strategy"
    inits = [f"{prefix}.init_args.{name}={str(value).lower()}" for name, value in zip(NAMES, VALUES, strict=True)]
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    return [*trainer, f"{prefix}=lightning_zero.ZeROStrategy", *inits]


@pytest.mark.parametrize("form", ["arguments", "yaml"])
def test_the_cli_takes_the_strategy_by_class_path(form: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(YAML)
    cli = parsed(arguments() if form == "arguments" else [f"--config={config}"])
    inits = cli.config.trainer.strategy.init_args
    assert tuple(inits[name] for name in NAMES) == VALUES
    strategy = cli.trainer.strategy
    assert type(strategy) is ZeROStrategy
    assert strategy.stage == 2


def test_the_cli_refuses_a_stage_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed([*arguments(), "--trainer.strategy.init_args.stage=two"])
    assert "stage" in capsys.readouterr().err
