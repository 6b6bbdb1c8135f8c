"""Modules and parameters of torch that are out of the ordinary train sharded as they do plain."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from twin import compare

STAGES = (0, 1, 2, 3)


def draw(seed: int, *shape: int) -> Tensor:
    """Random numbers of the default dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, vocabulary: int, *shape: int) -> Tensor:
    """Random ids."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


class Bags(nn.Module):
    """Bags in the root and in units; ids that occur on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 5, mode="sum")
        self.layers = nn.ModuleList(nn.EmbeddingBag(7, 5, mode="mean", padding_idx=0) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        ids = tokens(seed, 7, 3, 4)
        x = self.bag(ids + 3, per_sample_weights=draw(seed, 3, 4))
        for layer in self.layers:
            x = torch.tanh(x + layer(ids))
        return x.pow(2).sum()


class MaxNorm(nn.Module):
    """Embeddings that shrink the rows they look up, in forward; both ranks look up the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Embedding(7, 5, max_norm=0.5) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        ids = tokens(seed // 10, 7, 3, 4)
        x = self.embedding(ids + 3)
        for layer in self.layers:
            x = torch.tanh(x + layer(ids) * draw(seed, 5))
        return x.pow(2).sum()


class Norms(nn.Module):
    """Group, instance and RMS norm, PReLU, bilinear layers and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1, groups=2),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm2d(4, affine=True),
                nn.PReLU(4),
                nn.RMSNorm(5),
            )
            for _ in range(9)
        )
        self.mix = nn.Bilinear(5, 5, 3)

    def forward(self, seed: int) -> Tensor:
        x = self.up(draw(seed, 2, 2, 3, 3))
        for layer in self.layers:
            x = x + layer(x)
        return self.mix(x, x.flip(0)).pow(2).mean()


class ChannelsLast(nn.Module):
    """All weights of four dimensions lie channels last; one matrix is transposed, one is expanded from a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, (3, 2), padding="same") for _ in range(9))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(3, 3), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(6, 6)[::2, 1::2])
        self.to(memory_format=torch.channels_last)

    def forward(self, seed: int) -> Tensor:
        x = draw(seed, 2, 3, 4, 5).to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x @ self.transposed @ self.expanded @ self.strided).pow(2).mean()


class Complex(nn.Module):
    """Complex weights, real ones beside them, and a view of one as real."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.gain = nn.Parameter(torch.randn(5))
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.complex128) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        x = torch.fft.fft(draw(seed, 3, 5) * self.gain) * self.spectrum
        for layer in self.layers:
            x = x + 0.1 * layer(x).conj()
        return x.abs().pow(2).mean() + torch.view_as_real(self.spectrum).sum()


class Dtypes(nn.Module):
    """Frozen integers and booleans, scalars and empty parameters beside trained ones, in the root and in units."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Parameter(torch.randint(256, (5, 3), dtype=torch.uint8), requires_grad=False)
            self.mask = nn.Parameter(torch.rand(5) < 0.5, requires_grad=False)
            self.order = nn.Parameter(torch.randperm(5), requires_grad=False)
            self.scale = nn.Parameter(torch.randn(()))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.shift = nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            low, high = self.packed & 15, self.packed >> 4
            weight = torch.cat([low, high], 1)[:, :5].to(x.dtype) / 8 - 1
            y = F.linear(x, weight * self.scale, self.shift * self.mask)
            return x + torch.tanh(y[:, self.order] + self.nothing.sum())

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(5, 3)
        self.layers = nn.ModuleList(Dtypes.Layer() for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        x = draw(seed, 3, 5) * self.count
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.cat([x, self.empty.expand(3, 0)], 1)).pow(2).mean()


class Containers(nn.Module):
    """Parameters in lists and dictionaries of torch, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"down": nn.Linear(5, 5), "up": nn.Linear(5, 5, bias=False)}) for _ in range(9)
        )
        self.gains = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(9)])
        self.named = nn.ParameterDict({"bias": torch.randn(5), "parts": nn.ParameterList([torch.randn(5, 2)])})

    def forward(self, seed: int) -> Tensor:
        x = draw(seed, 3, 5)
        for gain, layer in zip(self.gains, self.layers):
            x = x + gain * layer["up"](torch.tanh(layer["down"](x)))
        return ((x + self.named["bias"]) @ self.named["parts"][0]).pow(2).mean()


class Recurrent(nn.Module):
    """Bidirectional, projected, with dropout, over packed sequences of different lengths; and single cells."""

    def __init__(self, kind: Callable[..., nn.Module], **arguments: int) -> None:
        super().__init__()
        self.rnn = kind(5, 3, 2, bidirectional=True, dropout=0.5, batch_first=True, **arguments)
        self.layers = nn.ModuleList(kind(5, 5, batch_first=True) for _ in range(9))
        self.cell = nn.GRUCell(2 * arguments.get("proj_size", 3), 5)

    def forward(self, seed: int) -> Tensor:
        x: PackedSequence = pack_sequence([draw(seed + i, n, 5) for i, n in enumerate((4, 2, 1))])
        for layer in self.layers:
            x = x._replace(data=x.data + layer(x)[0].data)
        torch.manual_seed(seed)
        padded, _ = pad_packed_sequence(self.rnn(x)[0], batch_first=True)
        return self.cell(padded[:, 0]).pow(2).sum()


class Transformer(nn.Module):
    """Encoder and decoder; evaluation takes torch's fused path, which reads the weights of children it never calls."""

    def __init__(self) -> None:
        super().__init__()
        arguments = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**arguments), 9)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**arguments), 2)
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True, add_bias_kv=True)

    def forward(self, seed: int) -> Tensor:
        x = draw(seed, 2, 3, 4)
        mask = torch.tensor([[False, False, True], [False, False, False]])
        quick = 0.0
        for context in (torch.no_grad, torch.inference_mode):
            self.eval()
            with context():
                # Padded positions hold what the path that torch chose left there.
                quick += float(self.encoder(x, src_key_padding_mask=mask)[~mask].pow(3).sum())
                quick += float(self.encoder(x).pow(3).sum())
                quick += float(self.attention(x, x[..., :3], x[..., :2])[0].sum())
            self.train()
        y = self.decoder(x, self.encoder(x, src_key_padding_mask=mask))
        y = self.attention(y, y[..., :3], y[..., :2])[0]
        return (y * math.sin(quick)).pow(2).mean()


class Parametrized(nn.Module):
    """Weight norm over another dimension, orthogonal weights and a parametrization of one's own, cached in the loss."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).t()

    def __init__(self) -> None:
        super().__init__()
        parametrize, norms = nn.utils.parametrize, nn.utils.parametrizations
        self.first = norms.orthogonal(nn.Linear(5, 5))
        self.layers = nn.ModuleList(norms.weight_norm(nn.Linear(5, 5), dim=1) for _ in range(9))
        for layer in self.layers[::2]:
            parametrize.register_parametrization(layer, "bias", nn.Tanh())
        self.last = nn.Linear(5, 5)
        parametrize.register_parametrization(self.last, "weight", Parametrized.Symmetric())

    def forward(self, seed: int) -> Tensor:
        with nn.utils.parametrize.cached():
            x = self.first(draw(seed, 3, 5))
            for _ in range(2):
                for layer in self.layers:
                    x = x + torch.tanh(layer(x))
            return self.last(x).pow(2).mean() + self.last.weight.sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "bags": Bags,
    "max norm": MaxNorm,
    "norms": Norms,
    "channels last": ChannelsLast,
    "complex": Complex,
    "dtypes": Dtypes,
    "containers": Containers,
    "LSTM": lambda: Recurrent(nn.LSTM, proj_size=2),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "transformer": Transformer,
    "parametrized": Parametrized,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_in_one_plain_process(name: str, stage: int) -> None:
    """Losses, gradients and values of three steps of SGD with momentum and decay, to 1e-10 in float64."""
    compare(MODULES[name], stage)


class Sparse(nn.Module):
    """Embeddings that ask for sparse gradients, in the root and in units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5, sparse=True)
        self.layers = nn.ModuleList(nn.Embedding(7, 5, sparse=True) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        ids = tokens(seed, 7, 3, 4)
        x = self.embedding(ids + 3)
        for layer in self.layers:
            x = torch.tanh(x + layer(ids))
        return x.pow(2).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_become_dense_ones_of_the_same_value(stage: int) -> None:
    """Plain SGD, the one optimizer that takes both kinds: rows that no rank looked up stay as they are."""
    compare(Sparse, stage, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))


class MixedDtypes(nn.Module):
    """A bfloat16 layer after each float32 one, inside one unit; a bfloat16 scale in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, dtype=torch.bfloat16)) for _ in range(9)
        )

    def forward(self, seed: int) -> Tensor:
        x = draw(seed, 3, 5) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer[1](layer[0](x).bfloat16())).float()
        return x.pow(2).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_each_parameter_keeps_its_own_dtype(stage: int) -> None:
    """Halving a sum of two rounds as adding two halves does, so bfloat16 digits agree too: 1e-6, far below one."""
    compare(MixedDtypes, stage, dtype=torch.float32, tolerance=1e-6)


class Synchronized(nn.Module):
    """Batch statistics over the rows of all ranks, by collectives of the module's own in forward and in backward."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        x = torch.cat([draw(seed, 3, 5), draw(seed + 1, 3, 5)]) if self.joint else draw(seed, 3, 5)
        for layer in self.layers:
            x = layer(x)
            moments = torch.stack([x.mean(0), x.pow(2).mean(0)])
            if not self.joint:
                moments = all_reduce(moments) / 2
            x = torch.tanh((x - moments[0]) / (moments[1] - moments[0].pow(2) + 0.1).sqrt())
        return x.pow(3).mean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_may_call_collectives_of_its_own(stage: int) -> None:
    """As SyncBatchNorm does on GPUs: they mix with ours, and the twin sees all rows at once."""
    compare(lambda: Synchronized(joint=False), stage, make_twin=lambda: Synchronized(joint=True))
