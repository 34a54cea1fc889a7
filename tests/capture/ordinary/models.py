"""Models and losses of all kinds, trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.capture.ordinary.data import labelled, mlp, rows, tokens
from tests.capture.ordinary.running import Capture, Made, calls, fitted, program, states


@fitted()
def mlp_classifier() -> Made:
    model = mlp(6, 16, 4)
    return (
        model,
        lambda x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
        labelled(8, 6, classes=4),
    )


@fitted()
def cnn_with_batch_norm() -> Made:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return (
        model,
        lambda x, y: F.cross_entropy(model(x), y),
        labelled(8, 1, 8, 8, classes=3),
        torch.optim.SGD(model.parameters(), 0.1, 0.9),
    )


@fitted()
def batch_norm_of_average() -> Made:
    norm = nn.BatchNorm1d(6, momentum=None)
    model = nn.Sequential(norm, nn.Linear(6, 2))
    return (model, lambda x: model(x).square().mean(), rows(8, 6))


class LanguageModel(nn.Module):
    def __init__(self, kind: Any, size: int = 12) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(size, 8), kind(8, 8, batch_first=True)
        self.head = nn.Linear(8, size)

    def forward(self, ids: Tensor, state: Any = None) -> Any:
        out, state = self.rnn(self.embed(ids), state)
        return self.head(out), state


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@fitted()
def lstm_language_model() -> Made:
    model = LanguageModel(nn.LSTM)
    return (model, lambda ids: next_token(model(ids)[0], ids), tokens(4, 7, size=12))


@program()
def gru_with_state_handed_on(capture: Capture) -> list[Any]:
    model = LanguageModel(nn.GRU)
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(ids: Tensor, state: Tensor) -> Any:
        logits, state = model(ids, state)
        opt.zero_grad(set_to_none=True)
        loss: Any = next_token(logits, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.detach(), state.detach()

    fast, state, losses = capture(step), torch.zeros(1, 4, 8), []
    for (ids,) in tokens(4, 7, size=12):
        loss, state = fast(ids, state)
        losses.append(loss.item())
    return [losses, *states(model, opt, state)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (e.view(b, t, self.heads, c // self.heads).transpose(1, 2) for e in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class NanoGPT(nn.Module):
    """In the manner of nanoGPT, weights of embedding and head tied."""

    def __init__(self, size: int = 16, width: int = 8, block: int = 16) -> None:
        super().__init__()
        self.block = block
        self.wte, self.wpe = nn.Embedding(size, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        t = idx.size(1)
        assert t <= self.block, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits[:, [-1], :], None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@program()
def nano_gpt(capture: Capture) -> list[Any]:
    model = NanoGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)

    def step(x: Tensor, y: Tensor) -> Any:
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    batches = [(ids[:, :-1].clone(), ids[:, 1:].clone()) for (ids,) in tokens(2, 9, size=16)]
    return [*calls(capture(step), batches), *states(model, opt)]


@fitted()
def transformer_encoder_with_padding() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8, padding_idx=0), "encoder": encoder})

    def loss(ids: Tensor) -> Any:
        padded = ids == 0
        out = model["encoder"](model["embed"](ids), src_key_padding_mask=padded)
        return (out.square().mean(-1) * ~padded).sum() / (~padded).sum()

    return (model, loss, [(ids.clamp(min=0),) for (ids,) in tokens(3, 6, size=20)])


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 12, 4), mlp(2, 12, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


@fitted()
def vae() -> Made:
    model = Vae()

    def loss(x: Tensor) -> Any:
        out, mu, logvar = model(x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return F.mse_loss(out, x, reduction="sum") + kl

    return (model, loss, rows(8, 6))


@program()
def gan_with_two_optimizers(capture: Capture) -> list[Any]:
    gen, dis = mlp(4, 16, 6), mlp(6, 16, 1)
    opt_g = torch.optim.Adam(gen.parameters(), 2e-3, (0.5, 0.999))
    opt_d = torch.optim.Adam(dis.parameters(), 2e-3, (0.5, 0.999))

    def step(real: Tensor) -> dict[str, Tensor]:
        fake = gen(torch.randn(real.shape[0], 4))
        opt_d.zero_grad()
        loss_d: Any = F.softplus(-dis(real)).mean() + F.softplus(dis(fake.detach())).mean()
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g: Any = F.softplus(-dis(fake)).mean()
        loss_g.backward()
        opt_g.step()
        return {"d": loss_d.detach(), "g": loss_g.detach()}

    return [*calls(capture(step), rows(8, 6)), *states(gen, dis, opt_g, opt_d)]


@fitted()
def wgan_with_gradient_penalty() -> Made:
    critic = mlp(6, 12, 1)

    def loss(real: Tensor, fake: Tensor) -> Any:
        eps = torch.rand(real.size(0), 1)
        mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
        (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (grad.norm(2, dim=1) - 1).square().mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    return (critic, loss, [(a, b) for (a,), (b,) in zip(*[rows(8, 6)] * 2, strict=True)])


@fitted()
def contrastive() -> Made:
    model = mlp(6, 16, 8)
    model.register_parameter("scale", nn.Parameter(torch.tensor(math.log(1 / 0.07))))

    def loss(one: Tensor, other: Tensor) -> Any:
        a, b = F.normalize(model(one), dim=-1), F.normalize(model(other), dim=-1)
        logits = model.get_parameter("scale").exp().clamp(max=100) * a @ b.T
        labels = torch.arange(len(one))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return (model, loss, [(x, x + 0.1 * torch.randn_like(x)) for (x,) in rows(8, 6)])


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), 2.0 / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.merged = False

    def delta(self) -> Any:
        return self.b @ self.a * self.scaling

    def forward(self, x: Tensor) -> Any:
        out: Tensor = self.base(x)
        return out if self.merged else out + F.linear(x, self.delta())

    def merge(self, sign: int = 1) -> None:
        self.base.weight.data = self.base.weight.data + sign * self.delta().detach()
        self.merged = sign > 0


def lora_model() -> nn.Sequential:
    return nn.Sequential(Lora(nn.Linear(6, 12)), nn.ReLU(), Lora(nn.Linear(12, 4)))


@fitted()
def lora() -> Made:
    model = lora_model()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    return (model, lambda x, y: F.cross_entropy(model(x), y), labelled(8, 6, classes=4), opt)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(mlp(6, 8, 6) for _ in range(4))

    def forward(self, x: Tensor, by_mask: bool = True) -> tuple[Tensor, Tensor]:
        probs = self.gate(x).softmax(-1)
        top, chosen = probs.topk(2, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if by_mask:
                out = out + (top * (chosen == number)).sum(-1, keepdim=True) * expert(x)
            else:
                row, column = torch.where(chosen == number)
                out.index_add_(0, row, top[row, column, None] * expert(x[row]))
        balance = 4 * (probs.mean(0) * F.one_hot(chosen[:, 0], 4).float().mean(0)).sum()
        return out, balance


def experts_loss(model: Experts, by_mask: bool) -> Any:
    def loss(x: Tensor) -> Any:
        out, balance = model(x, by_mask)
        return (out - x).square().mean() + 0.01 * balance

    return loss


@fitted()
def mixture_of_experts() -> Made:
    model = Experts()
    return (model, experts_loss(model, True), rows(8, 6))


@fitted()
def mixture_of_experts_by_rows() -> Made:
    model = Experts()
    return (model, experts_loss(model, False), rows(8, 6))


@fitted()
def denoising_autoencoder() -> Made:
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))

    def loss(x: Tensor) -> Any:
        noisy = x * torch.bernoulli(torch.full_like(x, 0.8)) + 0.1 * torch.randn_like(x)
        return F.smooth_l1_loss(model(noisy), x)

    return model, loss, rows(8, 8)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.empty(1, 5, 8))
        nn.init.trunc_normal_(self.pos, std=0.02)
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


@fitted()
def vit_with_mixup() -> Made:
    model = Vit()

    def loss(x: Tensor, y: Tensor) -> Any:
        lam, order = torch.rand(()), torch.randperm(x.size(0))
        out = model(lam * x + (1 - lam) * x[order])
        return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])

    return (model, loss, labelled(4, 3, 8, 8, classes=3))


@fitted(refused="sparse gradients")
def word2vec_with_sparse_adam() -> Made:
    model = nn.ModuleList([nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)])

    def loss(ids: Tensor) -> Any:
        center, other, negative = model[0](ids[:, 0]), model[1](ids[:, 1]), model[1](ids[:, 2:])
        scores = (negative @ center[:, :, None]).squeeze(2)
        positive = F.logsigmoid((center * other).sum(1))
        return -(positive + F.logsigmoid(-scores).sum(1)).mean()

    opt = torch.optim.SparseAdam(list(model.parameters()), 0.01)
    return (model, loss, tokens(6, 5, size=20), opt)


@fitted()
def policy_gradient() -> Made:
    policy = mlp(4, 8, 3)

    def loss(seen: Tensor, reward: Tensor) -> Any:
        dist: Any = torch.distributions.Categorical(logits=policy(seen))
        action = dist.sample()
        gain = (reward - reward.mean()) / (reward.std() + 1e-6)
        return -(dist.log_prob(action) * gain + 0.01 * dist.entropy()).mean()

    return (policy, loss, [(torch.randn(8, 4), torch.rand(8)) for _ in range(8)])


@fitted()
def distillation() -> Made:
    teacher, student = nn.Sequential(mlp(6, 16, 4), nn.Dropout(0.5)).eval(), mlp(6, 8, 4)

    def loss(x: Tensor, y: Tensor) -> Any:
        with torch.inference_mode():
            soft = F.softmax(teacher(x) / 2.0, -1)
        out = student(x)
        match = F.kl_div(F.log_softmax(out / 2.0, -1), soft.clone(), reduction="batchmean")
        return 0.5 * F.cross_entropy(out, y) + 2.0 * match

    return (student, loss, labelled(8, 6, classes=4))


@fitted()
def ctc_with_lengths_in_tensors() -> Made:
    model = nn.Sequential(nn.Linear(5, 6), nn.LogSoftmax(-1))

    def loss(x: Tensor, y: Tensor, n: Tensor, m: Tensor) -> Any:
        return F.ctc_loss(model(x), y, n, m, zero_infinity=True)

    batches = [
        (torch.randn(9, 2, 5), torch.randint(1, 6, (2, 3)), torch.tensor([9 - i % 2, 8]),
         torch.tensor([3, 2 - i % 2]))
        for i in range(8)
    ]  # fmt: skip
    return (model, loss, batches)


@fitted()
def spectral_and_weight_norm() -> Made:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.LeakyReLU(0.2),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 1)),
    )
    return (model, lambda x: F.softplus(model(x)).mean(), rows(8, 6))


@fitted()
def checkpointed_activations() -> Made:
    one, two = nn.Sequential(mlp(6, 8, 6), nn.Dropout(0.3)), mlp(6, 8, 2)
    model = nn.ModuleList([one, two])

    def loss(x: Tensor) -> Any:
        return two(checkpoint(one, x, use_reentrant=False)).square().mean()

    return (model, loss, rows(8, 6))


@program()
def regression_by_hand(capture: Capture) -> list[Any]:
    w, b = torch.randn(3, 1, requires_grad=True), torch.zeros(1, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Any:
        loss: Any = ((x @ w + b - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for p in (w, b):
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad.zero_()
        return loss.item()

    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(8)]
    return [*calls(capture(step), batches), *states(w, b)]


@fitted()
def scripted_module() -> Made:
    model = torch.jit.script(mlp(6, 8, 2))
    return (model, lambda x: model(x).square().mean(), rows(8, 6))
