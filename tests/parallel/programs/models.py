"""Small models of the kinds that people train, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH, WORDS = 8, 12


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.ReLU(inplace=True), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True)),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class Recurrent(nn.Module):
    """An LSTM and a layer; or a GRU on packed sequences."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        kind: Any = nn.GRU if packed else nn.LSTM
        self.rnn = kind(WIDTH, 6, 2, batch_first=True, bidirectional=packed)
        self.last = nn.Linear(12 if packed else 6, 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            y, _ = self.rnn(x)
            return self.last(y).mean(1)  # type: ignore[no-any-return]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.last(y.sum(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A decoder of two layers, whose head may be the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList([Decoder(), Decoder()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class DenseExperts(nn.Module):
    """Experts in tensors of three dims, each of which sees every row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 6) / 3)
        self.down = nn.Parameter(torch.randn(3, 6, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bi,eio->ebo", x, self.up).tanh()
        out = torch.einsum("ebi,eio->ebo", each, self.down)
        return torch.einsum("ebo,be->bo", out, self.gate(x).softmax(-1))


class RoutedExperts(nn.Module):
    """Experts that see the rows that are sent to them; one of them may see none on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return out


class Experts(nn.Module):
    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.mixture = RoutedExperts() if routed else DenseExperts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.mixture(x))  # type: ignore[no-any-return]


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 8))
        self.decode = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * (log / 2).exp()), mean, log


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, 4))
        self.other = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, 4))
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = (F.normalize(t, dim=-1) for t in (self.one(x), self.other(y)))
        return one, other, self.scale.exp()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.SiLU(inplace=True))
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.middle(skip))], 1))  # type: ignore[no-any-return]


class Bags(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=sparse)
        self.rows = nn.Embedding(WORDS, WIDTH, padding_idx=0, max_norm=None)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.bags(tokens) + self.rows(tokens[:, 0]))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)  # type: ignore[no-any-return]


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        Residual(),
        Residual(),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


class Adapted(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it (LoRA)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.a, self.b = nn.Linear(fan_in, 2, bias=False), nn.Linear(2, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    frozen = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)).requires_grad_(False)
    return nn.Sequential(
        Adapted(WIDTH, 12), nn.Tanh(), frozen, Adapted(12, 12), nn.Tanh(), nn.Linear(12, 3)
    )
