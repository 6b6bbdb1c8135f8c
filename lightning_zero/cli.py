"""The command ``lightning-zero``: plans, and what one process does to a checkpoint. No GPU is needed.

lightning-zero estimate --params 7.5B --gpus 64 --gpu-memory 80GB
lightning-zero page
lightning-zero inspect CHECKPOINT
lightning-zero export CHECKPOINT OUT --format safetensors|ckpt
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_zero.checkpoint.reading import describe, export_file, export_safetensors
from lightning_zero.checkpoint.stored import CheckpointError
from lightning_zero.planner.command import add_commands, run_estimate, run_page
from lightning_zero.planner.question import PlanError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "estimate":
            run_estimate(args)
        elif args.command == "page":
            run_page(args)
        elif args.command == "inspect":
            print(describe(args.checkpoint))
        elif args.format == "ckpt":
            export_file(args.checkpoint, args.out)
        else:
            prefix = export_safetensors(args.checkpoint, args.out, args.prefix, int(args.shard_gb * 1e9))
            if prefix:
                print(f"Names are without {prefix!r}, where this module holds its model.")
    except PlanError as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, OSError, ImportError, pickle.UnpicklingError) as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "Plan a run; look at a checkpoint, or export it."
    parser = argparse.ArgumentParser(prog="lightning-zero", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    add_commands(commands)
    inspect = commands.add_parser("inspect", help="names, shapes, dtypes and sizes in a checkpoint, and what wrote it")
    inspect.add_argument("checkpoint", type=Path, help="a file or a directory")
    export = commands.add_parser("export", help="write a checkpoint in another form, in bounded memory")
    export.add_argument("checkpoint", type=Path, help="a file or a directory")
    export.add_argument("out", type=Path, help="the file, or the folder for safetensors")
    export.add_argument(
        "--format",
        choices=("safetensors", "ckpt"),
        default="safetensors",
        help="safetensors: weights as Hugging Face reads them; ckpt: everything, as DDP writes it",
    )
    export.add_argument(
        "--prefix", help="of names, which safetensors are to be without, as 'model.'; default: all share it"
    )
    export.add_argument("--shard-gb", type=float, default=5.0, help="most GB (1e9 bytes) of a safetensors file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
