"""The interactive page: one file without network, which reads the same formula table as the command."""

from __future__ import annotations

import json
from importlib.resources import files

from lightning_zero.planner.estimate import Estimate
from lightning_zero.planner.formulas import formula_table

__all__ = ["page_of"]


def page_of(estimate: Estimate) -> str:
    """The page as HTML, set to what ``estimate`` was asked."""
    question = estimate.question
    start = {
        "params": estimate.subject.numel,
        "gpus": question.gpus,
        "gpuMemory": question.gpu_memory,
        "precision": question.precision,
        "optimizer": question.optimizer,
        "stage": 0 if estimate.recommendation.row is None else estimate.recommendation.row.choice.stage,
        "seqLen": question.seq_len or 0,
        "microBatch": question.micro_batch,
        "link": question.slowest_link,
    }
    template = files("lightning_zero.planner").joinpath("page.html").read_text()
    table = json.dumps(formula_table(), separators=(",", ":"))
    return template.replace("/*TABLE*/{}", table).replace("/*START*/{}", json.dumps(start))
