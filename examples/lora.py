"""LoRA fine-tuning of the model of `sft.py`, on the same texts: the base is frozen and sharded, adapters are trained.

    SmolLM2-135M-Instruct + adapters of rank 8 -> Trainer(strategy="zero3") -> OUT/adapter, an ordinary peft folder

    python examples/lora.py                             two processes; a few minutes on two cores
    python examples/lora.py --stage 2 --max-steps 100

Gradients and optimizer state exist for the adapters alone, at every stage.
"""

import warnings

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from sft import (
    QUIET,
    SEED,
    HeldBytes,
    SupervisedFineTuning,
    build_loaders,
    build_strategy,
    docstring_pairs,
    find_model,
    format_bytes_table,
    load_model,
    load_tokenizer,
    parse_args,
)

LORA = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
LEARNING_RATE = 1e-3


def main() -> None:
    parser, args = parse_args("Train adapters of a chat model on Python's own docstrings.", "lora_output", "adapter/")
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    seed_everything(SEED)
    held_bytes = HeldBytes()
    try:
        trainer = Trainer(
            strategy=build_strategy(args),
            accelerator=args.accelerator,
            devices=args.devices,
            precision=args.precision,
            max_steps=args.max_steps,
            max_epochs=1,
            log_every_n_steps=1,
            callbacks=[held_bytes],
            default_root_dir=args.out,
            logger=False,
            enable_checkpointing=False,
        )
        source = find_model(args.model)
        train, held_out = build_loaders(docstring_pairs(), load_tokenizer(source), args)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))
    module = SupervisedFineTuning(get_peft_model(load_model(source), LORA), LEARNING_RATE)
    trained, numel = module.model.get_nb_trainable_parameters()

    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, train)
    [after] = trainer.validate(module, held_out, verbose=False)
    if not trainer.is_global_zero:
        return

    # After fit the module is whole again; while it is sharded, save inside `lightning_zero.gathered(module)`.
    module.model.save_pretrained(args.out / "adapter")
    print(f"""
held-out loss       {before["held_out_loss"]:.4f} -> {after["held_out_loss"]:.4f}
trained parameters  {trained:,} of {numel:,}

{format_bytes_table(held_bytes.of_ranks, held_bytes.planned)}

Wrote {args.out / "adapter"}.""")


if __name__ == "__main__":
    main()
