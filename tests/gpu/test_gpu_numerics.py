"""What is learned is what plain training learns on the same GPU, in every precision and by kernels that no CPU has."""

from __future__ import annotations

from collections import Counter
from functools import cache

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from one_gpu import DEVICE, STAGES, Net, assert_equal, built, inputs, shard, state
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_zero import ZeROStrategy

TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 1e-2, "16-mixed": 1e-2, "bf16-true": 1e-2}
"""Of losses, relative: summation order in fp32, and a few roundings of 2^-8 to 2^-11 where kernels add atomically."""


class Transformer(L.LightningModule):
    """Learns to repeat a few sequences; its loss falls by more than any tolerance."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 65, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, 40)
        self.losses = []

    def training_step(self, tokens, batch_idx):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(strategy, make, batches, **arguments):
    """Losses of every step of one epoch on one GPU, and the Trainer."""
    accelerator = "gpu" if DEVICE.type == "cuda" else "cpu"
    trainer = L.Trainer(
        accelerator=accelerator, devices=1, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    model = make()
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return [float(loss) for loss in model.losses], trainer


SEQUENCES = [torch.randint(40, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in [0, 1] * 6]


@cache
def plainly_fitted(precision):
    return fitted("auto", Transformer, SEQUENCES, precision=precision)[0]


def assert_learned(found, expected, tolerance):
    assert expected[-1] < 0.9 * expected[0], "there was something to learn"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_every_precision_trains_as_without_a_strategy(nccl, precision, stage):
    """Twelve steps through the Trainer, within the tolerances above. A GPU's autocast has its own lists of functions,
    attention has kernels that no CPU has, and NCCL moves two-byte weights."""
    found, _ = fitted(ZeROStrategy(stage), Transformer, SEQUENCES, precision=precision)
    assert_learned(found, plainly_fitted(precision), TOLERANCES[precision])


@pytest.mark.parametrize("precision", TOLERANCES)
def test_one_gpu_alone_trains_as_without_a_strategy(precision):
    """`Trainer(devices=1, strategy="zero3")` over the group that Lightning makes: an NCCL one, which a CPU has not."""
    try:
        found, _ = fitted("zero3", Transformer, SEQUENCES, precision=precision)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert_learned(found, plainly_fitted(precision), TOLERANCES[precision])


@pytest.mark.parametrize("stage", STAGES)
def test_a_real_scaler_skips_the_same_steps(nccl, stage):
    """fp16 gradients overflow under a scale of 2^24 until it has fallen; losses repeat meanwhile, and agree to 1e-2.
    A GPU's GradScaler reads whether a gradient overflowed from the device, by a kernel over sharded gradients."""

    def run(strategy):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**24, backoff_factor=2.0**-3)
        plugin = MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)
        losses, trainer = fitted(strategy, Transformer, SEQUENCES[::2] * 2, plugins=[plugin])
        return losses, trainer.precision_plugin.scaler.get_scale()

    expected, scale = run("auto")
    assert expected[0] == expected[1], "the first step was skipped"
    assert scale < 2.0**24
    found, own_scale = run(ZeROStrategy(stage))
    assert found[0] == found[1]
    assert own_scale == scale
    assert_learned(found, expected, TOLERANCES["16-mixed"])


# Optimizers.

KERNELS = {
    "default": ({}, "aten::_foreach_", ("aten::addcdiv_", "aten::_fused_")),
    "fused": ({"fused": True}, "aten::_fused_adamw_", ("aten::addcdiv_", "aten::_foreach_addcdiv_")),
    "loop": ({"foreach": False}, "aten::addcdiv_", ("aten::_foreach_addcdiv_", "aten::_fused_")),
}
"""Arguments of AdamW; how the operations begin that must run, and those that must not."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", KERNELS)
def test_adamw_runs_the_kernels_that_it_runs_on_plain_parameters(nccl, name, stage):
    """Four steps equal plain ones to 1e-10 in float64; torch takes its many-tensor kernels by itself on a GPU only,
    and only for types that it knows."""
    arguments, wanted, unwanted = KERNELS[name]

    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **arguments)
        for step in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(inputs(step, 5, 7)), inputs(step + 5, 5, 3)).backward()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                optimizer.step()
        return Counter(event.name for event in profile.events()), state(model)

    _, expected = trained(built(Net).to(DEVICE))
    calls, found = trained(shard(built(Net), stage, units=["Block"])[0])
    assert_equal(found, expected)
    assert [call for call in calls if call.startswith(wanted)]
    assert not [call for call in calls if call.startswith(unwanted)]


# Modules.


def steps(model, loss_of, lr=0.05):
    """Losses of four steps of SGD with momentum, and what was learned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses, state(model)


class Recurrent(nn.Module):
    """Layers that read packed sequences of several lengths, one after the other."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind(6, 3, num_layers=2, bidirectional=True, batch_first=True) for _ in range(9))

    def forward(self, x, lengths):
        for layer in self.layers:
            layer.flatten_parameters()
            packed, _ = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return x


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_on_cudnn(nccl, kind, stage):
    """Packed sequences, 1e-8 in float64. cuDNN wants weights in one piece and packs them anew where they are not: a
    CPU has another kernel, which takes them one by one."""

    def loss_of(model, step):
        return model(inputs(step, 4, 5, 6), torch.tensor([5, 2, 4, 1])).pow(2).sum()

    expected = steps(built(lambda: Recurrent(kind)).to(DEVICE), loss_of)
    model, engine = shard(built(lambda: Recurrent(kind)), stage)
    assert len(engine.units) > 1
    assert_equal(steps(model, loss_of), expected, 1e-8)


class Spectral(nn.Module):
    """Complex weights, in units and in the root."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.complex128) for _ in range(9))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.abs().pow(2).mean()


@pytest.mark.parametrize("stage", STAGES)
def test_complex_weights_travel_over_nccl(nccl, stage):
    """1e-10. NCCL knows no complex numbers; gloo takes them."""

    def loss_of(model, step):
        return model(inputs(step, 3, 5))

    def make():
        torch.manual_seed(0)
        return Spectral()

    expected = steps(make().to(DEVICE), loss_of)
    model, _ = shard(make(), stage)
    assert_equal(steps(model, loss_of), expected)


class Normalized(L.LightningModule):
    """Batch norms between linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(6))
        self.losses = []
        self.kinds = Counter()

    def on_train_start(self):
        self.kinds.update(type(module).__name__ for module in self.modules())

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(x, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize("stage", STAGES)
def test_sync_batch_norm_is_put_in_before_sharding(nccl, stage):
    """`sync_batchnorm=True` gives the losses of plain batch norms on one rank, within 1e-4 in fp32. SyncBatchNorm
    refuses tensors of a CPU."""
    models = []

    def make():
        models.append(Normalized())
        return models[-1]

    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(0))] * 12
    expected, _ = fitted("auto", make, batches)
    found, _ = fitted(ZeROStrategy(stage), make, batches, sync_batchnorm=True)
    plain, sharded = (model.kinds for model in models)
    assert plain["BatchNorm1d"] == sharded["SyncBatchNorm"] == 6
    assert_learned(found, expected, 1e-4)
    assert_equal(
        {name: value.cpu() for name, value in models[1].state_dict().items() if "running" in name},
        {name: value.cpu() for name, value in models[0].state_dict().items() if "running" in name},
        1e-3,
    )
