"""The command: what it says of a checkpoint of either form, and what it makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from rows import launched
from safetensors.torch import load_file
from test_checkpoints import Net, built, data, make_trainer

from lightning_zero import ZeROStrategy
from lightning_zero.cli import main


@pytest.fixture(scope="module", params=["full", "sharded"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """Of two ranks, after two steps; and the module that was saved."""
    path = tmp_path_factory.mktemp("cli") / "x.ckpt"

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        module = built()
        with launched(rank):
            trainer = make_trainer(ZeROStrategy(3, state_dict_type=request.param), 2)
            trainer.fit(module, data(rank, 2))
            trainer.save_checkpoint(path)
        return dict(module.state_dict())

    module = Net()
    module.load_state_dict(run_ranks(2, on_rank)[0])
    return path, module


def test_inspect_tells_names_shapes_sizes_and_who_wrote_it(
    checkpoint: tuple[Path, Net], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are counted to the byte: the tied one twice, as its two names."""
    path, module = checkpoint
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    state = module.state_dict()
    assert ("a directory, written by 2 ranks" if path.is_dir() else "one file") in text
    assert "global_step: 2" in text and "pytorch-lightning_version: " in text
    (line,) = (line for line in text.splitlines() if line.startswith("embed.weight"))
    assert line.split() == ["embed.weight", "11x5", "float32", "220", "bytes"]
    assert f"weights: {len(state)} tensors, {sum(value.nbytes for value in state.values()):,} bytes" in text
    # Of 22 parameters one got no gradient. Two moments, and a step counter of 4 bytes.
    trained = [p for n, p in module.named_parameters() if p.requires_grad and n != "unused"]
    assert f"optimizer 0: 21 parameters, {sum(8 * p.numel() + 4 for p in trained):,} bytes" in text


@pytest.mark.parametrize("shard_gb", ["5", "1e-6"])
def test_export_writes_safetensors(checkpoint: tuple[Path, Net], shard_gb: str, tmp_path: Path) -> None:
    """In one file, or in several with an index."""
    path, module = checkpoint
    assert main(["export", str(path), str(tmp_path / "out"), "--shard-gb", shard_gb]) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    if shard_gb == "5":
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert {index["weight_map"][name] for name in found} == {file.name for file in files}
        assert all(sum(value.nbytes for value in load_file(file).values()) <= 1000 for file in files)


def test_export_writes_an_ordinary_file(checkpoint: tuple[Path, Net], tmp_path: Path) -> None:
    """Which a plain process loads, optimizer state included; nothing else is left behind."""
    path, module = checkpoint
    out = tmp_path / "one.ckpt"
    assert main(["export", str(path), str(out), "--format", "ckpt"]) == 0
    assert list(tmp_path.iterdir()) == [out]
    plain = Net.load_from_checkpoint(out)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())

    def on_rank(_: int) -> list[float]:
        resumed = Net()
        make_trainer("auto", 1, max_epochs=2).fit(resumed, data(0, 1), ckpt_path=out)
        return resumed.losses

    assert len(run_ranks(1, on_rank)[0]) == 2


def test_what_is_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with a status that scripts see."""
    (tmp_path / "text").write_text("not a checkpoint")
    assert main(["inspect", str(tmp_path / "text")]) == 1
    assert f"lightning-zero: `{tmp_path / 'text'}` cannot be read, or is damaged" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "not found" in capsys.readouterr().err
