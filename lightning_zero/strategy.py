"""`ZeROStrategy`: Lightning's hooks, each a few lines that call the engine.

setup                   shard the module in place, then the user's optimizers over resting parameters
training_step, ...      a step of user code, in which the root opens
teardown                the module is whole and plain again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_zero._lightning import Flavour, installed_flavours, own_collectives
from lightning_zero.activation import activation_policies
from lightning_zero.callbacks import copies_of_module, refuse_unfit
from lightning_zero.checkpoint.background import BackgroundSaver
from lightning_zero.checkpoint.directory import (
    is_directory,
    load_directory,
    named_optimizer_state,
    save_directory,
    whole_views,
)
from lightning_zero.checkpoint.file import load_file, save_file
from lightning_zero.checkpoint.objects import whole_values
from lightning_zero.checkpoint.one_file import (
    full_optimizer_state,
    full_state_dict,
    load_state_dict,
    shard_optimizer_state,
)
from lightning_zero.checkpoint.places import is_local
from lightning_zero.checkpoint.pretrained import from_pretrained_once
from lightning_zero.collectives import Collectives
from lightning_zero.compiled import compile_options
from lightning_zero.copies import shard_copy, share_buffers, unshard_copy
from lightning_zero.engine import Engine, engine_of
from lightning_zero.host import host_fits
from lightning_zero.offload import OffloadTarget
from lightning_zero.out_of_memory import explained, is_out_of_memory
from lightning_zero.placements import stage_placements
from lightning_zero.precision import RECIPES, PrecisionRecipe
from lightning_zero.sharding import checked_offload, shard, unshard
from lightning_zero.units import UnitSpec

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

__all__ = ["PytorchLightningZeROStrategy", "ZeROStrategy", "register_strategies"]

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


class _ZeROMixin(_DDPStrategy):
    """The strategy over either flavour's ``DDPStrategy``, which supplies launchers, ranks and the process group.

    Args:
        stage: 1 shards the optimizer state, 2 also gradients, 3 also parameters; 0 is plain data parallelism.
        offload: where main weights, gradients and optimizer state rest in place of the device: "cpu", "disk", or an
            `OffloadTarget` as `HostMemory` and `MappedFile`.
        activation_checkpointing: what units keep for backward: "full", "selective", "offload", a set of module classes
            to recompute, an `ActivationPolicy` as `Recompute(every=2)`, or several of these; default: everything.
        compile: compile the forward of each unit, equal ones once; a dictionary holds arguments of ``torch.compile``.
        units: which submodules are gathered and freed together: classes, class names, or a predicate; default: blocks,
            or what they consist of, so that each holds at most 1/4 of the parameters, or is one layer.
        recipe: dtypes of training state; default: the row of the Trainer's ``precision`` in `RECIPES`.
        state_dict_type: a checkpoint is "full", one file as DDP writes it, or "sharded", a directory into which every
            rank writes its part; both are read by themselves, whatever this says.
        async_save: write checkpoints in the background, from a copy in host memory; the next one, and the end of the
            run, wait for it.
        ranks_may_differ: let ranks use different blocks in training at stage 3 too, as for batches without images or
            experts without tokens, at a price; else that is a `RanksDifferError`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout, start_method: as for ``DDPStrategy``.
        find_unused_parameters, static_graph, gradient_as_bucket_view: accepted, because existing projects pass them,
            and without a meaning here: unused parameters and changing graphs just work.

    Raises:
        ValueError: ``stage``, ``offload`` or ``state_dict_type`` is unknown, or they do not go together.
        TypeError: another argument is unknown.
    """

    _flavour: Flavour

    def __init__(
        self,
        stage: int = 3,
        offload: OffloadTarget | str | None = None,
        activation_checkpointing: Any = None,
        compile: bool | dict[str, Any] = False,
        units: UnitSpec | None = None,
        recipe: PrecisionRecipe | None = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        async_save: bool = False,
        ranks_may_differ: bool = False,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        **unknown: Any,
    ) -> None:
        self._offload = checked_offload(offload, stage_placements(stage))
        self._policies = activation_policies(activation_checkpointing)
        self._compile = compile_options(compile)
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"state_dict_type={state_dict_type!r} is unknown: expected 'full', one file, or 'sharded', a directory."
            )
        self._is_sharded = state_dict_type == "sharded"
        self._async_save = async_save
        self._saver: BackgroundSaver | None = None
        self._loaded: Mapping[str, Any] = {}
        # Weights of the checkpoint that is being made, while it keeps them.
        self._gathered: WeakValueDictionary[Any, Tensor] | None = None
        if unknown:
            raise TypeError(
                f"ZeROStrategy does not know {min(unknown)!r}. It takes stage, offload, activation_checkpointing,"
                " compile, units, recipe, state_dict_type, async_save, ranks_may_differ and the process arguments of"
                " DDPStrategy: `ZeROStrategy(stage=3)`."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.stage = stage
        self._units = units
        self._recipe = recipe
        self._ranks_may_differ = ranks_may_differ
        self._interrupted = False
        given = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        ddp_arguments = [name for name, value in given.items() if value is not None]
        if ddp_arguments:
            self._flavour.rank_zero_info(
                f"ZeROStrategy: {', '.join(ddp_arguments)} has no meaning here and is ignored; unused parameters and"
                " changing graphs need no setting."
            )

    def __repr__(self) -> str:
        # The other flavour's Trainer prints this when it refuses the object.
        return (
            f"{type(self).__name__}(stage={self.stage}) for `{self._flavour.trainer_package}.Trainer`; the name"
            f" strategy='zero{self.stage}' works in both packages"
        )

    # Set-up and teardown

    @property
    def engine(self) -> Engine | None:
        """The engine of the module in training, between setup and teardown."""
        return None if self.lightning_module is None else engine_of(self.lightning_module)

    def setup_environment(self) -> None:
        if self.root_device.type == "mps":
            raise ValueError(
                "ZeROStrategy needs collectives, which MPS has not. Use `Trainer(accelerator='cpu', devices=2)`."
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._interrupted = False
        assert self.model is not None and self.lightning_module is not None
        fitting = trainer.state.fn == self._flavour.fitting
        if fitting:
            refuse_unfit(trainer, self._flavour, self._async_save)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        plain = {n: p.dtype for n, p in self.lightning_module.named_parameters(remove_duplicate=False)}
        # A module too large to be whole on the host stayed at rest after the last run.
        if self.engine is None or self.engine.stage_placements != stage_placements(self.stage):
            shard(
                self.lightning_module,
                stage=self.stage,
                units=self._units,
                precision=self._recipe or RECIPES.get(self.precision_plugin.precision),
                device=self.root_device,
                offload=self._offload,
                local_ranks=self.num_processes,
                activation_checkpointing=self._policies,
                compile=self._compile,
                ranks_may_differ=self._ranks_may_differ,
                log=self._flavour.rank_zero_info,
            )
        assert self.engine is not None
        if self.engine.abandoned:
            raise RuntimeError(
                f"`{type(self.lightning_module).__name__}` was left sharded when an exception ended its last run, and"
                " other ranks may have gone. Build the module anew."
            )
        self._restore_digits(plain)
        self.engine.has_steps = True
        for place, loop, method in own_collectives(trainer):
            self._meet_before(place, loop, method)
        for copy in copies_of_module(trainer, self._flavour):
            shard_copy(copy, self.lightning_module)
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.engine.adopt(optimizer)
        self.setup_precision_plugin()

    def _meet_before(self, place: str, loop: Any, method: str) -> None:
        own = getattr(type(loop), method)

        def met(*args: Any, **kwargs: Any) -> Any:
            self._meet(place)
            return own(loop, *args, **kwargs)

        setattr(loop, method, met)

    def model_to_device(self) -> None:
        # Parameters go to the device as shards, and buffers with them; a metric keeps its state beside both.
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)

    def teardown(self) -> None:
        try:
            self._teardown()
        finally:
            saver, self._saver = self._saver, None
            if saver is not None and self._interrupted:
                # Lightning is about to kill the processes; other ranks may never arrive.
                saver.wait_at_most(60)
            elif saver is not None:
                saver.close()

    def _teardown(self) -> None:
        if self._lightning_module is not None and self._lightning_module._trainer is not None:
            for _, loop, method in own_collectives(self._lightning_module.trainer):
                vars(loop).pop(method, None)
        if self.engine is None or self._leave(self.engine):
            super().teardown()
            return
        # As there, but for moving the module to the host, which its shards would refuse.
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()

    def _leave(self, engine: Engine) -> bool:
        """Make the module plain, where all ranks got here and the host has room for it; false where it is not."""
        module = self.lightning_module
        assert module is not None
        if self._interrupted and (engine.collectives.world_size > 1 or engine.failed):
            # Other ranks may never arrive: a collective here would hide the exception behind a hang.
            engine.abandon()
            return False
        engine.meet("end")
        if not host_fits(engine, self.num_processes):
            engine.rest()
            self._flavour.rank_zero_warn(
                "The host cannot hold one whole copy of the model per local rank, so its parameters stay sharded."
                " Read them in parts on every rank, `with lightning_zero.gathered(submodule): ...`, or take them from"
                " the checkpoint."
            )
            return False
        try:
            for copy in copies_of_module(module.trainer, self._flavour):
                unshard_copy(copy, device=torch.device("cpu"))
            unshard(module, device=torch.device("cpu"))
        except Exception as error:
            if not self._interrupted:
                raise
            # The traceback of the user's exception may hold views of weights; it is what the user must see.
            engine.abandoned = True
            self._flavour.rank_zero_warn(f"After the exception the module could not be made whole: {error}")
            return False
        return True

    def on_exception(self, exception: BaseException) -> None:
        self._interrupted = True
        module = self.lightning_module
        if is_out_of_memory(exception) and self.engine is not None and module is not None:
            batches = module.trainer.accumulate_grad_batches
            try:
                exception.args = (explained(exception, self.engine, module, self.optimizers, batches),)
            except Exception as another:  # the device may be past answering; the error must be told all the same
                exception.args = (f"{exception}\nWhat was planned cannot be told: {another!r}",)
        super().on_exception(exception)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Built on the host and sharded onto the device: a whole model may not fit there.
        collectives = Collectives.of(None, self.root_device)
        with (
            self._flavour.initializing(bool(empty_init)),
            self.precision_plugin.tensor_init_context(),
            from_pretrained_once(collectives),
        ):
            yield

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None and self.lightning_module is not None
        with self.engine.training_step(is_manual=not self.lightning_module.automatic_optimization):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().predict_step(*args, **kwargs)

    def _step(self) -> Any:
        assert self.engine is not None
        return self.engine.step()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._share_buffers()
        # An averaging callback is about to validate its copy in the module's place.
        assert self.engine is not None and self.lightning_module is not None
        for copy in copies_of_module(self.lightning_module.trainer, self._flavour):
            share_buffers(copy, self.engine.collectives)

    def on_test_start(self) -> None:
        super().on_test_start()
        self._share_buffers()

    def _share_buffers(self) -> None:
        assert self.engine is not None
        self.engine.meet("evaluation")
        self.engine.share_buffers()

    # Where ranks communicate: those that finish early serve the others before they wait for them

    def _meet(self, place: str) -> None:
        if self.engine is not None and not self._interrupted:
            self.engine.meet(place)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._meet("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._meet("broadcast")
        return super().broadcast(obj, src)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("reduce")
        return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        self._meet("all_gather")
        return super().all_gather(*args, **kwargs)

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._share_buffers()

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.engine is not None and closure_loss.requires_grad:
            # Its gradient is the first thing in the outermost graph task, on ranks without any other gradient too.
            begin = self.engine.reducer.begin
            closure_loss.register_hook(lambda _: begin())

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.engine is not None
        with self.engine.accumulate():
            yield

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        trainer = self.lightning_module._trainer
        if self.engine is not None and self.world_size > 1 and trainer is not None and trainer.interrupted:
            # Ranks that did not raise never join, and the exception would hide behind a hang.
            raise RuntimeError(
                "an exception ended this run on this rank, so no checkpoint can be gathered from the others."
                " Resume from the last one: `trainer.fit(model, ckpt_path='last')`."
            )
        state_dict: dict[str, Any] = self.lightning_module.state_dict()
        if self._is_sharded:
            return state_dict
        self._gathered = WeakValueDictionary()
        return full_state_dict(state_dict, self._gathered)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if hasattr(optimizer, "consolidate_state_dict"):
            return super().optimizer_state(optimizer)
        if self._is_sharded:
            assert self.lightning_module is not None
            return named_optimizer_state(optimizer, self.lightning_module)
        return full_optimizer_state(optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_state_dict(self.lightning_module, checkpoint["state_dict"], strict)
        self._loaded = checkpoint["state_dict"] if self.engine is None else {}

    def _restore_digits(self, loaded_in: Mapping[str, torch.dtype]) -> None:
        """Load again what has more digits now, in main weights, than the module had when a checkpoint was loaded.

        Args:
            loaded_in: dtypes of the plain module, by name.
        """
        loaded, self._loaded = self._loaded, {}
        assert self.lightning_module is not None
        wider = {
            name: loaded[name]
            for name, parameter in self.lightning_module.named_parameters(remove_duplicate=False)
            if name in loaded and parameter.dtype.itemsize > loaded_in[name].itemsize
        }
        if wider:
            load_state_dict(self.lightning_module, wider, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(shard_optimizer_state(optimizer, state))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        path = self.broadcast(filepath)
        # After fit the module is whole, and the optimizer's state is sharded yet.
        collectives = self.engine.collectives if self.engine is not None else Collectives.of(None, self.root_device)
        by_others = storage_options is not None or not self._writes_files
        if self._is_sharded and by_others:
            raise ValueError(
                "state_dict_type='sharded' writes a directory itself, where neither `storage_options` nor another"
                " `checkpoint_io` has a say. Write `ZeROStrategy(state_dict_type='full')`."
            )
        if self._is_sharded:
            checkpoint = whole_views(checkpoint)
        with nullcontext() if self.engine is None else self.engine.without_windows():
            checkpoint = whole_values(checkpoint, collectives, self._gathered, keeps_entries=self._is_sharded)
        self._gathered = None
        if by_others or not (self._is_sharded or is_local(path)):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = save_directory if self._is_sharded else save_file
        if not self._async_save or self.engine is None:
            # Nothing goes on beside it after fit, and the next line may read it.
            save(checkpoint, path, collectives)
            return
        if self._saver is None:
            self._saver = BackgroundSaver(collectives, self._timeout)
        saver = self._saver
        saver.wait()
        staged = saver.stage(checkpoint) if self._is_sharded or self.is_global_zero else {}
        saver.begin(partial(save, staged, path, saver.collectives))

    def remove_checkpoint(self, filepath: Any) -> None:
        # Not before the one that takes its place is complete.
        if self._saver is None or not self._saver.then(partial(super().remove_checkpoint, filepath)):
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._saver is not None:
            self._saver.wait()
        if (is_local(checkpoint_path) or self._writes_files) and is_directory(checkpoint_path):
            return load_directory(checkpoint_path, weights_only)
        if not (is_local(checkpoint_path) and self._writes_files):
            return super().load_checkpoint(checkpoint_path, weights_only)
        return load_file(checkpoint_path, weights_only)

    @property
    def _writes_files(self) -> bool:
        """Whether nobody plugged in another way to write and read checkpoints."""
        return type(self.checkpoint_io) is self._flavour.checkpoint_io

    # Names

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for stage in (1, 2, 3):
            for suffix, start_method in _START_METHODS.items():
                strategy_registry.register(
                    f"zero{stage}{suffix}",
                    cls,
                    description=f"ZeRO stage {stage}, start method {start_method!r}",
                    stage=stage,
                    start_method=start_method,
                )
            strategy_registry.register(
                f"zero{stage}_offload",
                cls,
                description=f"ZeRO stage {stage}, stepped in host memory",
                stage=stage,
                offload="cpu",
            )


def _strategy_class(flavour: Flavour, name: str) -> type[_ZeROMixin]:
    """The strategy for one flavour's Trainer."""
    # Bound by name in this module: so pickles, and LightningCLI's class paths, find the class again.
    members = {"_flavour": flavour, "__doc__": _ZeROMixin.__doc__, "__module__": __name__, "__qualname__": name}
    return type(name, (_ZeROMixin, flavour.ddp_strategy), members)


_first, *_others = installed_flavours()

ZeROStrategy = _strategy_class(_first, "ZeROStrategy")
"""For ``lightning.pytorch.Trainer``, or ``pytorch_lightning.Trainer`` where only that is installed."""

PytorchLightningZeROStrategy = _strategy_class(_others[0], "PytorchLightningZeROStrategy") if _others else ZeROStrategy
"""For ``pytorch_lightning.Trainer``."""


def register_strategies() -> None:
    """Make ``zero1``, ``zero2``, ``zero3`` and their launcher variants known to every installed Trainer, once."""
    for kind in {ZeROStrategy, PytorchLightningZeROStrategy}:
        if "zero3" not in kind._flavour.registry:
            kind.register_strategies(kind._flavour.registry)
