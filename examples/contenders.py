"""How each contender of `benchmark.py` trains one model on the same tokens; every rank of a run calls `train`.

    none                      no strategy, through the Trainer: one process, on rank 0's tokens alone
    ddp                       `DDPStrategy`, through the Trainer
    zero1  zero2  zero3       this package, through the Trainer
    zero3-differ              stage 3, whose ranks might use different blocks
    none-loop  ddp-loop       the same in a plain loop, as the peers below
    zero1-loop to zero3-loop
    fsdp2                     torch's `fully_shard`, of each block and of the root
    fsdp2-whole               the same, with parameters kept whole from forward to backward
    fsdp1                     torch's `FullyShardedDataParallel`, of each block
    deepspeed1 to deepspeed3  DeepSpeed's stages, where it is installed

A peer is set to train as torch's AdamW does: where its defaults change gradients or weights, they are switched off.
"""

import argparse
import importlib.util
import os
import platform
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from llamas import MODELS, build_llama, random_tokens
from measuring import Clock, Peak, loopback_bytes, peak_bytes, resting_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lightning_zero
from lightning_zero import PrecisionRecipe, ZeROStrategy
from lightning_zero.engine import engine_of
from lightning_zero.precision import RECIPES

ALONE = ("none", "none-loop")
"""Contenders without other ranks, which see rank 0's tokens only."""
STAGES = (1, 2, 3)
TRAINERS = ("none", "ddp", *(f"zero{stage}" for stage in STAGES), "zero3-differ")
LOOPS = ("none-loop", "ddp-loop", *(f"zero{stage}-loop" for stage in STAGES))
DEEPSPEED = tuple(f"deepspeed{stage}" for stage in STAGES)
CONTENDERS = (*TRAINERS, *LOOPS, "fsdp2", "fsdp2-whole", "fsdp1", *DEEPSPEED)
PRECISIONS = (*(name for name in RECIPES if name != "64-true"), "bf16-true-main32")
"""Of the Trainer, and its "bf16-true" with fp32 main weights in this package."""
OF_ALL = ("32-true", "bf16-mixed")
"""Precisions that every contender has."""
LEARNING_RATE = 1e-3


def stage_of(contender: str) -> int | None:
    """ZeRO stage of what ``contender`` shards; `fully_shard` and FSDP1 are stage 3, kept whole as well."""
    if contender.startswith("fsdp"):
        return 3
    digits = [int(digit) for digit in contender if digit.isdigit()]
    return digits[0] if digits else None


def missing(contender: str) -> str | None:
    """Why ``contender`` cannot run here."""
    if contender in DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed. Write `DS_BUILD_OPS=0 pip install deepspeed`."
    return None


def num_batches(args: argparse.Namespace) -> int:
    """Batches of one run: the start of the last one ends the last timed step."""
    return int(args.warmup + args.steps + 1)


def tokens_of(args: argparse.Namespace, rank: int) -> Tensor:
    """Shape (batches, batch size, tokens)."""
    vocab = MODELS[args.model]["vocab_size"]
    return random_tokens((num_batches(args), args.batch_size, args.tokens), vocab, rank)


def build_model(args: argparse.Namespace) -> nn.Module:
    # Lightning would build it on the GPU where there is no strategy, from other random numbers.
    with torch.device("cpu"):
        return build_llama(MODELS[args.model], args.tokens).train()


def build_optimizer(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=LEARNING_RATE, fused=True)


# What is measured, in either kind of loop.


class Recorder:
    """Measures one rank: seconds of each timed step, then memory, in the step after them, and traffic.

    Args:
        args: of the benchmark.
        device: of this rank.
        model: as it trains.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, model: nn.Module) -> None:
        self.args, self.device, self.model = args, device, model
        self.clock = Clock(device)
        self.loss = torch.zeros(())
        self.peak = Peak()
        self.measured: dict[str, Any] = {"counted_bytes": None, "sent_bytes": None}
        self._sent_before: int | None = None

    def begin_batch(self, index: int) -> None:
        """Batch ``index`` is about to be computed with."""
        self.clock.mark()
        if index == self.args.warmup:
            self._begin_traffic()
        if index == self.args.warmup + self.args.steps:
            self._end_traffic()
            self.measured["resting_bytes"] = resting_bytes(self.model)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.peak.__enter__()

    def _begin_traffic(self) -> None:
        if engine := engine_of(self.model):
            engine.collectives.reset_counts()
        self._sent_before = loopback_bytes() if self.device.type == "cpu" else None

    def _end_traffic(self) -> None:
        steps = self.args.steps
        if self._sent_before is not None and dist.is_initialized():
            after = loopback_bytes()
            assert after is not None
            self.measured["sent_bytes"] = (after - self._sent_before) / steps / dist.get_world_size()
        if engine := engine_of(self.model):
            payload, world_size = sum(engine.collectives.nbytes.values()), engine.collectives.world_size
            self.measured["counted_bytes"] = payload / steps * (world_size - 1) / world_size

    def finish(self) -> dict[str, Any]:
        """All that was measured, after the last batch."""
        self.peak.__exit__()
        is_gpu = self.device.type == "cuda"
        return {
            **self.measured,
            "step_seconds": self.clock.intervals()[self.args.warmup :],
            "loss": self.loss.item(),
            "peak_bytes": peak_bytes(self.device) if is_gpu else self.peak.begun + self.peak.nbytes,
            "peak_rss_bytes": peak_bytes(torch.device("cpu")),
            "num_threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if is_gpu else platform.machine(),
        }


# Through the Trainer.


class RandomLlama(LightningModule):
    """A Llama of ``args.model`` on random tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def configure_model(self) -> None:
        self.model = build_model(self.args)

    def train_dataloader(self) -> DataLoader[Tensor]:
        tokens: Any = tokens_of(self.args, self.global_rank).flatten(0, 1)
        return DataLoader(tokens, batch_size=self.args.batch_size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> AdamW:
        return build_optimizer(self.parameters())


class Recording(Callback):
    """A `Recorder` in the Trainer's hooks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.result: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder = Recorder(self.args, pl_module.device, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self.recorder.begin_batch(batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.recorder.loss = outputs["loss"].detach()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.result = self.recorder.finish()


def build_strategy(contender: str, precision: str) -> Strategy | str:
    """The strategy of a contender in `TRAINERS`, for ranks that are already started."""
    if contender == "none":
        return "auto"
    if contender == "ddp":
        return DDPStrategy()
    recipe = PrecisionRecipe(main=torch.float32) if precision == "bf16-true-main32" else None
    stage, differs = int(contender[len("zero")]), contender.endswith("-differ")
    strategy: Strategy = ZeROStrategy(stage, recipe=recipe, ranks_may_differ=differs)
    return strategy


def build_trainer(args: argparse.Namespace, contender: str, callback: Callback) -> Trainer:
    precision: Any = args.precision.removesuffix("-main32")
    return Trainer(
        strategy=build_strategy(contender, args.precision),
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1 if contender in ALONE else args.devices,
        precision=precision,
        max_steps=num_batches(args),
        callbacks=[callback],
        use_distributed_sampler=False,  # each rank's tokens are its own
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train_with_trainer(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    recording = Recording(args)
    build_trainer(args, contender, recording).fit(RandomLlama(args))
    return recording.result


# In a plain loop.


class Loop:
    """A model that is ready to train, and its step.

    Args:
        model: called with tokens.
        autocasts: compute under bf16 autocast.
    """

    def __init__(self, model: nn.Module, autocasts: bool = False) -> None:
        self.model = model
        self.autocasts = autocasts
        self.optimizer = build_optimizer(model.parameters())

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16) if self.autocasts else nullcontext():
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class DeepSpeedLoop(Loop):
    """DeepSpeed's engine, which owns backward and step."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, stage: int, device: torch.device) -> None:
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        numel = sum(parameter.numel() for parameter in model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": args.batch_size,
            # By default 2 GB of fp32, however small the model is.
            "zero_optimization": {"stage": stage, "reduce_bucket_size": min(500_000_000, numel)},
            "gradient_clipping": 0.0,  # else DeepSpeed 0.19 clips to a norm of 1
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": args.precision == "bf16-mixed"},
        }
        self.autocasts = False
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model.parameters()), config=config, dist_init_required=False
        )

    def step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        engine: Any = self.model
        engine.backward(loss)
        engine.step()
        return loss.detach()


def loop_of(args: argparse.Namespace, contender: str, device: torch.device) -> Loop:
    """The plain loop of any contender that is not in `TRAINERS`."""
    is_mixed = args.precision == "bf16-mixed"
    model: Any = build_model(args)
    if contender in DEEPSPEED:
        stage = stage_of(contender)
        assert stage is not None
        return DeepSpeedLoop(model, args, stage, device)
    model.to(device)
    if contender.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else MixedPrecisionPolicy()
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=policy, reshard_after_forward=False if contender == "fsdp2-whole" else None)
        return Loop(model)
    if contender == "fsdp1":
        mixed = MixedPrecision(torch.bfloat16, torch.float32) if is_mixed else None
        blocks = ModuleWrapPolicy({LlamaDecoderLayer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=blocks, mixed_precision=mixed, device_id=device)
        return Loop(model)
    if contender == "ddp-loop":
        model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    elif contender != "none-loop":
        model = lightning_zero.shard(model, stage_of(contender) or 3, precision=RECIPES[args.precision], device=device)
    return Loop(model, autocasts=is_mixed)


def train_in_loop(args: argparse.Namespace, contender: str, rank: int) -> dict[str, Any]:
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if contender not in ALONE:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    loop = loop_of(args, contender, device)
    recorder = Recorder(args, device, loop.model)
    for index, batch in enumerate(tokens_of(args, rank).to(device)):
        recorder.begin_batch(index)
        recorder.loss = loop.step(batch)
    return recorder.finish()


def train(args: argparse.Namespace, contender: str, rank: int) -> dict[str, Any]:
    """Train on this rank, whose environment says who the others are as `torchrun` does, and return what it measured."""
    torch.set_num_threads(args.threads)
    return train_with_trainer(args, contender) if contender in TRAINERS else train_in_loop(args, contender, rank)
