"""What `transformers` models do beside training: they generate, count, resize and tie, sharded as plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from lightning.pytorch import Callback, Trainer
from rows import (
    STAGES,
    Regression,
    Run,
    assert_trained_as,
    fit_plain,
    fit_ranks,
    setup_module,  # noqa: F401
    teardown_module,  # noqa: F401
    tokens,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves

VOCABULARY = 13
PROMPT = torch.tensor([[1, 2, 3], [3, 1, 2]])

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 7, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "looking up the prompt": {"prompt_lookup_num_tokens": 2},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
}


class Writer(Regression):
    """A tiny Llama whose vocabulary grows in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.LlamaConfig(
            vocab_size=VOCABULARY - 3, hidden_size=12, intermediate_size=9, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, pad_token_id=0,
            tie_word_embeddings=True,
        )  # fmt: skip
        self.model: Any = hf.LlamaForCausalLM(config)

    def configure_model(self) -> None:
        if self.model.config.vocab_size < VOCABULARY:
            self.model.resize_token_embeddings(VOCABULARY, mean_resizing=False)

    def write(self, **how: Any) -> Any:
        torch.manual_seed(7)
        prompt = PROMPT[:1] if "prompt_lookup_num_tokens" in how else PROMPT
        out = self.model.generate(prompt, max_new_tokens=4, **how)
        return out.tolist() if isinstance(out, Tensor) else [out.sequences.tolist(), torch.stack(out.scores)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch).loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.record.append(self.write())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Writes(Callback):
    """Generates in every way, after each batch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.record.append([module.write(**how) for how in WAYS.values()])


class Describes(Callback):
    """What a model says about itself, sharded, in training and in between."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        model = module.model
        module.record.append(
            [
                model.num_parameters(), model.num_parameters(only_trainable=True), model.get_memory_footprint(),
                str(model.dtype), str(model.device), model.num_parameters(exclude_embeddings=True),
                [tuple(p.shape) for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)],
                model.get_input_embeddings().weight is model.get_output_embeddings().weight,
                sorted(model.state_dict()), model.config.vocab_size,
            ]
        )  # fmt: skip

    on_train_batch_start = on_train_batch_end


class Ties(Callback):
    """Calls what libraries call again and again, and what writes weights."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.model.tie_weights()
        if trainer.global_step == 1:
            with torch.no_grad():
                module.model.model.norm.weight.copy_(torch.full((12,), 1.5))
                module.model.get_input_embeddings().weight[3] += 0.5
        module.record.append(module.model.lm_head.weight is module.model.model.embed_tokens.weight)


CALLBACKS: dict[str, Callable[[], Callback]] = {"generating": Writes, "describing": Describes, "tying": Ties}


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_answers_as_in_one_plain_process(name: str, stage: int) -> None:
    """Text, scores, numbers and shapes on both ranks; and training, on a vocabulary that has grown, is the twin's."""

    def arguments() -> dict[str, Any]:
        return {"callbacks": [CALLBACKS[name]()], "validation": tokens(1, VOCABULARY, length=4)}

    twin: Run = fit_plain(Writer, tokens(2, VOCABULARY, length=4), **arguments())
    runs = fit_ranks(stage, Writer, tokens(2, VOCABULARY, length=4), **arguments())
    assert_trained_as(twin, runs)
    assert len(twin.record) >= 4
    for run in runs:
        for found, expected in zip(tree_leaves(run.record), tree_leaves(twin.record), strict=True):
            assert found == expected if not isinstance(expected, Tensor) else (found - expected).abs().max() < 1e-10
