"""What it takes to write and read a checkpoint in either form, beside torch's own functions for the same bytes.

    file, directory     this package: weights and moments of a sharded run, gathered or in parts
    torch               `torch.save` and `torch.load` of whole tensors, by rank 0
    dcp                 `torch.distributed.checkpoint` of DTensors, which are sharded as FSDP2 shards

    python examples/checkpoint_benchmark.py                 two processes, 1 GB; needs 4 GB of disk in --out
    python examples/checkpoint_benchmark.py --width 512

Rounds are interleaved; a time ends when all ranks have finished. Files are in the page cache when they are read.
Beside each time stands the most memory that a process took on top of what it had, in one more round, as to look
takes time: private pages, so pages of mapped files do not count.
"""

import argparse
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from measuring import Peak
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeROStrategy
from lightning_zero.checkpoint.directory import load_directory
from lightning_zero.checkpoint.file import load_file

BLOCKS = 20


class Model(LightningModule):
    """Linear blocks; a step of AdamW gives them moments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(BLOCKS)))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(2 * dist.get_world_size(), self.width), batch_size=1)  # type: ignore[arg-type]

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Bench(Model):
    """Measures when its training ends, while it is sharded."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(args.width)
        self.rounds, self.folder = args.rounds, folder
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, float] = {}
        self.looks = False

    def on_train_end(self) -> None:
        whole = {
            kind: {name: torch.randn(p.shape) for name, p in self.named_parameters()} for kind in ("weights", "m", "v")
        }
        mesh = init_device_mesh("cpu", (self.trainer.world_size,))
        sharded = {
            kind: {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
            for kind, values in whole.items()
        }
        paths = {form: self.folder / form for form in ("file", "directory", "torch", "dcp")}
        for number in range(self.rounds + 1):
            self.looks = number == 0
            if self.global_rank == 0:
                for path in paths.values():
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.timed("write file", lambda: self.save(paths["file"], "full"))
            self.timed("write directory", lambda: self.save(paths["directory"], "sharded"))
            self.timed("write torch", lambda: self.torch_save(whole, paths["torch"]))
            self.timed("write dcp", lambda: dcp.save(sharded, checkpoint_id=paths["dcp"]))
            self.timed("read file", lambda: self.load(load_file(paths["file"], True)))
            self.timed("read directory", lambda: self.load(load_directory(paths["directory"], True)))
            self.timed("read torch", lambda: torch.load(paths["torch"]))
            self.timed("read dcp", lambda: dcp.load(sharded, checkpoint_id=paths["dcp"]))
        nbytes = sum(value.nbytes for values in whole.values() for value in values.values())
        if self.global_rank == 0:
            print(f"\n{nbytes / 1e6:,.0f} MB of weights and moments, {self.trainer.world_size} ranks")
            for name, seconds in self.seconds.items():
                spread = f"({min(seconds):.3f} - {max(seconds):.3f})"
                first, others = (f"{self.peaks[f'{name} {rank}'] / 1e6:,.0f} MB" for rank in ("0", "others"))
                print(f"{name:<16}{median(seconds):8.3f} s   {spread:<18}{first:>10} on rank 0, {others} on another")

    def timed(self, name: str, work: Callable[[], Any]) -> None:
        dist.barrier()
        if not self.looks:
            started = time.perf_counter()
            work()
            dist.barrier()
            self.seconds.setdefault(name, []).append(time.perf_counter() - started)
            return
        with Peak() as peak:
            work()
            dist.barrier()
        taken = [torch.zeros(()) for _ in range(self.trainer.world_size)]
        dist.all_gather(taken, torch.tensor(float(peak.nbytes)))
        for place, nbytes in (("0", taken[0]), ("others", max(taken[1:], default=taken[0]))):
            self.peaks[f"{name} {place}"] = float(nbytes)

    def save(self, path: Path, form: str) -> None:
        strategy: Any = self.trainer.strategy
        strategy._is_sharded = form == "sharded"
        self.trainer.save_checkpoint(path)

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.trainer.strategy.load_model_state_dict(checkpoint)
        self.trainer.strategy.load_optimizer_state_dict(checkpoint)

    def torch_save(self, whole: Any, path: Path) -> None:
        if self.global_rank == 0:
            with open(path, "wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())  # as the others do


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time of checkpoints.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=2048, help=f"of {BLOCKS} square weights; 2048 is 1 GB with moments"
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="where files are written; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    print(f"{shlex.join(['python', *sys.argv])}: Python {platform.python_version()}, {versions}")
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        trainer = Trainer(
            accelerator="cpu", devices=args.devices, strategy=ZeROStrategy(3, start_method="fork"), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Bench(args, Path(folder)))


if __name__ == "__main__":
    main()
