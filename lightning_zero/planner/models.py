"""Models to plan for, built on ``meta``: no weight is read, and none takes memory."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero.planner.formulas import OWN_DTYPES
from lightning_zero.planner.question import PlanError
from lightning_zero.planner.subjects import ModuleSubject

__all__ = ["module_subject"]


def module_subject(source: Any, precision: str, lora_rank: int | None = None) -> ModuleSubject:
    """What is planned for.

    Args:
        source: a module, the folder or the ``config.json`` of a Hugging Face model, or ``package.module:Class``.
        precision: the Trainer's, which converts a module as Lightning does.
        lora_rank: of adapters on all products, which alone are trained; by `peft`.

    Raises:
        PlanError: ``source`` is none of these, or cannot be built.
    """
    if isinstance(source, nn.Module):
        module, title = _on_meta(source), type(source).__name__
    else:
        with torch.device("meta"):
            module = _imported(source) if ":" in source and not Path(source).exists() else _hugging_face(Path(source))
        title = f"{type(module).__name__} of `{source}`"
    if lora_rank is not None:
        module = _adapted(module, lora_rank)
        title = f"{title}, adapters of rank {lora_rank}"
    if precision.endswith("-true") and precision != "32-true":
        module = module.to(OWN_DTYPES[precision])
    if not any(True for _ in module.parameters()):
        raise PlanError(f"{title} has no parameters. Build its layers in `__init__`, or in `configure_model`.")
    return ModuleSubject(module, title)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory; shared parameters stay shared."""
    memo: dict[int, Any] = {}
    for value in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(value, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        memo[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)


def _imported(path: str) -> nn.Module:
    package, _, name = path.partition(":")
    try:
        kind = getattr(import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"model={path!r} cannot be imported: {error}. Write `package.module:Class`.") from error
    try:
        module = kind()
        if hasattr(module, "configure_model"):
            module.configure_model()
    except Exception as error:
        raise PlanError(f"model={path!r} cannot be built without arguments: {error}.") from error
    if not isinstance(module, nn.Module):
        raise PlanError(f"model={path!r} is a {type(module).__name__}, and no module.")
    return module


def _hugging_face(path: Path) -> nn.Module:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"`{path}` has no config.json: name the folder or the file of a Hugging Face model's config.")
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
    except ImportError as error:
        raise PlanError("a Hugging Face model is built by transformers: `pip install transformers`.") from error
    try:
        config: Any = AutoConfig.from_pretrained(file)
    except Exception as error:
        raise PlanError(f"`{file}` is no config of a Hugging Face model: {str(error).splitlines()[0]}") from error
    for auto in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel):
        if type(config) in auto._model_mapping:
            # Training holds fp32 weights, whatever those in the folder are, unless the precision says otherwise.
            module: nn.Module = auto.from_config(config, dtype=torch.float32)
            return module
    raise PlanError(f"`{file}` is of {type(config).__name__}, of which transformers makes no model.")


def _adapted(module: nn.Module, rank: int) -> nn.Module:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise PlanError(f"lora_rank={rank!r} must be a whole number above 0, as 16.")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("adapters are made by peft: `pip install peft`.") from error
    with torch.device("meta"):
        adapted: nn.Module = get_peft_model(module, LoraConfig(r=rank, target_modules="all-linear"))
    return adapted
