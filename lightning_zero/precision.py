"""The dtype of each station that training state passes, and a row of them for each ``Trainer(precision=...)``.

    main_weight -> model_weight -> gradient -> (reduction) -> main_grad -> optimizer -> main_weight

``main_weight`` is what the optimizer steps and a checkpoint keeps, ``model_weight`` is what is gathered and computes.

    precision      main_weight   model_weight of products, of others   gradient, reduction, main_grad   buffers
    "32-true"      own           own          own                      as main_weight                   own
    "64-true"      own           own          own                      as main_weight                   own
    "bf16-true"    own           own          own                      as main_weight                   own
    "16-true"      own           own          own                      as main_weight                   own
    "bf16-mixed"   fp32          bf16         own                      fp32                             own
    "16-mixed"     fp32          fp16         own                      fp32                             own

"own" is the dtype that a parameter has when it is sharded: Lightning has converted the module by then, where the
precision says so. "Products" are the weights that autocast casts before it computes with them; see `autocast`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RECIPES", "Dtypes", "PrecisionRecipe"]

_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts; float64, complex and integer tensors pass it unchanged, and pass every recipe so."""


@dataclass(frozen=True)
class Dtypes:
    """The stations of one group of parameters.

    Args:
        own: what the module was built with, and what its code expects.
        main: of the weights that the optimizer steps.
        model: of the whole weights.
        gradient: of the whole local gradients, in which micro-batches add up.
        reduce: of gradients on the wire.
        main_grad: of the mean gradients that rest; the optimizer reads them in ``main``.
        narrow: whether ``model`` is narrower than what the code expects, which only autocast's own functions may see.
    """

    own: torch.dtype
    main: torch.dtype
    model: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype
    main_grad: torch.dtype
    narrow: bool


@dataclass(frozen=True)
class PrecisionRecipe:
    """Dtypes of the training state of fp32, bf16 and fp16 parameters; ``None`` means "as the station before it".

    Frozen parameters have no master copy: they rest once, in their own dtype, and are gathered in ``compute``.
    Unfrozen later, they are stepped in that dtype.

    Args:
        main: ``main_weight``; ``None`` keeps each parameter's own dtype.
        compute: ``model_weight`` of those that autocast would cast anyway, the weights of matrix products. A 2-byte one
            halves the bytes of a gather and changes no result under autocast of the same dtype: the cast happens
            before the gather instead of after it. ``torch.float32`` gathers as data parallelism holds them.
        others: ``model_weight`` of all others (norms, embeddings). ``None`` keeps each parameter's own dtype, as data
            parallelism does.
        gradient: whole local gradients, in which micro-batches add up.
        reduce: gradients on the wire. Two bytes halve the traffic of a reduction and round what is summed.
        main_grad: mean gradients at rest. A 2-byte shard is widened group by group when somebody reads it, so it saves
            memory from backward to the optimizer step; micro-batches that add up in it lose digits.
        buffers: floating-point buffers; ``None`` keeps each buffer's own dtype.
    """

    main: torch.dtype | None = None
    compute: torch.dtype | None = None
    others: torch.dtype | None = None
    gradient: torch.dtype | None = None
    reduce: torch.dtype | None = None
    main_grad: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def dtypes(self, own: torch.dtype, *, trained: bool, gathered: bool, multiplied: bool) -> Dtypes:
        """The stations of a parameter.

        Args:
            own: the dtype it was built in.
            trained: whether it requires a gradient.
            gathered: whether its whole value is a copy that a gather makes. Where it is not, the whole weight is the
                main weight itself, and a narrower copy beside it would only cost memory.
            multiplied: whether it is the weight of matrix products, which autocast casts.
        """
        if own not in _AUTOCAST:
            return Dtypes(own, own, own, own, own, own, narrow=False)
        main = (self.main or own) if trained else own
        model = own
        if gathered:
            model = (self.compute if multiplied else self.others) or own
        gradient = self.gradient or main
        return Dtypes(
            own=own,
            main=main,
            model=model,
            gradient=gradient,
            reduce=self.reduce or gradient,
            main_grad=self.main_grad or main,
            narrow=multiplied and model != own,
        )


RECIPES: dict[str, PrecisionRecipe] = {
    "32-true": PrecisionRecipe(),
    "64-true": PrecisionRecipe(),
    "bf16-true": PrecisionRecipe(),
    "16-true": PrecisionRecipe(),
    "bf16-mixed": PrecisionRecipe(main=torch.float32, compute=torch.bfloat16),
    "16-mixed": PrecisionRecipe(main=torch.float32, compute=torch.float16),
}
"""By the name that ``Trainer(precision=...)`` takes."""
