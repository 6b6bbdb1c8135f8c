"""The interactive page: one file without network, which reads the same formula table as the command."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from lightning_zero.planner.estimate import MOST_GPUS, Estimate
from lightning_zero.planner.formulas import formula_table
from lightning_zero.planner.question import CARDS_PER_NODE, LARGEST_COUNT, Question
from lightning_zero.planner.subjects import SizeSubject

__all__ = ["page_of"]


def page_of(estimate: Estimate) -> str:
    """The page as HTML, ASCII alone, set to what ``estimate`` was asked."""
    table = {
        **formula_table(),
        "cardsPerNode": CARDS_PER_NODE,
        "mostGpus": MOST_GPUS,
        "mostParams": LARGEST_COUNT,
        "bandwidth": Question.bandwidth,
    }
    template = files("lightning_zero.planner").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("/*TABLE*/{}", _script(table)).replace("/*START*/{}", _script(_start(estimate)))


def _start(estimate: Estimate) -> dict[str, Any]:
    """The setting, by the names of `estimate`'s arguments; ``weigh``: what is not given, and what is shown for it."""
    question, best = estimate.question, estimate.recommendation.row
    shown = {
        "stage": 0 if best is None else best.choice.stage,
        "offload": "" if best is None else best.choice.offload,
        "activation_checkpointing": "" if best is None else best.choice.activation_checkpointing,
    }
    given = {name: getattr(question, name) for name in shown if getattr(question, name) is not None}
    shown.update(given)
    # Other policies depend on the operations of a model, which the page has not.
    shown["activation_checkpointing"] = "full" if shown["activation_checkpointing"] else ""
    return {
        "params": estimate.subject.numel,
        "gpus": question.gpus,
        "gpu_memory": question.gpu_memory,
        "precision": question.precision,
        "optimizer": question.optimizer,
        **shown,
        "seq_len": question.seq_len or 0,
        "micro_batch": question.micro_batch,
        "accumulate": question.accumulate,
        "nodes": question.nodes,
        "within": question.bandwidth[0],
        "between": question.bandwidth[1],
        "weigh": {name: name not in given for name in shown},
        "module": "" if isinstance(estimate.subject, SizeSubject) else estimate.subject.title,
    }


def _script(value: Any) -> str:
    """JSON inside a script element, which a `<` in a title must not end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
