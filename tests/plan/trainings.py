"""Training programs as people write them, which run pretended as they are."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tilework.distributed as dist
from tilework.data import DistributedSampler
from tilework.parallel import DistributedDataParallel, SyncBatchNorm, clip_grad_norm_, fully_shard


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def rows(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 4, (count,)))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = F.cross_entropy(model(torch.randn(2, 8)), torch.randint(0, 4, (2,)))
    return loss


def epochs() -> None:
    data = rows()
    sampler: Any = DistributedSampler(data)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = correct = 0
        running = 0.0
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            running += loss.item() * x.size(0)
            correct += (out.argmax(1) == y).sum().item()
            total += y.size(0)
        scheduler.step()
        print(f"epoch {epoch}: loss {running / total:.4f}, accuracy {correct / total:.2%}")


def finite_checks() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = loss_of(model)
        if math.isnan(loss.item()) or torch.isnan(loss) or loss != loss:
            raise RuntimeError("the loss is not a number")
        if not math.isfinite(float(loss)) or not torch.isfinite(loss).all():
            sys.exit(1)
        loss.backward()  # type: ignore[no-untyped-call]
        if all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
            optimizer.step()
        optimizer.zero_grad()


def accumulated() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(4):
        with model.no_sync() if i % 2 == 0 else contextlib.nullcontext():
            (loss_of(model) / 2).backward()  # type: ignore[no-untyped-call]
        if i % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print("norm", float(norm))


def best_model() -> None:
    model = DistributedDataParallel(net())
    best, folder = float("inf"), tempfile.mkdtemp()
    for _ in range(3):
        value = loss_of(model).item()
        if value < best:
            best = value
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "best.pt"))


def mixed_precision() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def averaged_weights() -> None:
    model = net()
    shadow, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    loss_of(wrapped).backward()  # type: ignore[no-untyped-call]
    average.update_parameters(model)
    with torch.no_grad():
        for mean, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter, alpha=0.1)


def schedulers() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm, plateau = LambdaLR(optimizer, lambda k: min(1, k / 10)), ReduceLROnPlateau(optimizer)
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warm.step()
        plateau.step(loss)


def early_stop() -> None:
    model, best, bad = DistributedDataParallel(net()), float("inf"), 0
    for _ in range(3):
        mean = loss_of(model).detach()
        dist.all_reduce(mean)
        if mean < best:
            best, bad = float(mean), 0
        else:
            bad += 1
        if bad > 1:
            break


def evaluation() -> None:
    model = DistributedDataParallel(net()).eval()
    counts, found = torch.zeros(2), []
    with torch.no_grad():
        for x, y in DataLoader(rows(), batch_size=4, num_workers=1):
            chosen = model(x).argmax(1)
            found += chosen.tolist()
            counts += torch.stack([(chosen == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(counts)
    print(json.dumps({"accuracy": (counts[0] / counts[1]).item(), "rows": len(found)}))


def resumed() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    path = os.path.join(tempfile.mkdtemp(), "state.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss.item()}
    torch.save(state, path)
    loaded = torch.load(path, weights_only=False)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def adversaries() -> None:
    making = DistributedDataParallel(nn.Linear(2, 8))
    judging = DistributedDataParallel(nn.Linear(8, 1))
    made, real = making(torch.randn(4, 2)), torch.randn(4, 8)
    loss = F.binary_cross_entropy_with_logits(judging(real), torch.ones(4, 1))
    loss.backward()  # type: ignore[no-untyped-call]
    F.softplus(-judging(made)).mean().backward()  # type: ignore[no-untyped-call]
    print(f"{loss.item():.3f}")


def contrasted() -> None:
    z = F.normalize(DistributedDataParallel(net())(torch.randn(4, 8)), dim=-1)
    everyone = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, z.detach())
    everyone[dist.get_rank()] = z
    F.cross_entropy(z @ torch.cat(everyone).T, torch.arange(4)).backward()  # type: ignore[no-untyped-call]


def padded() -> None:
    x = pad_sequence([torch.randint(1, 9, (n,)) for n in (3, 7, 5)], batch_first=True)
    words, layer = nn.Embedding(9, 8, padding_idx=0), nn.GRU(8, 4, batch_first=True)
    packed = pack_padded_sequence(words(x), (x != 0).sum(1), batch_first=True, enforce_sorted=False)
    pad_packed_sequence(layer(packed)[0], batch_first=True)[0].sum().backward()  # type: ignore[no-untyped-call]


def images() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten())
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(layers))
    model(torch.randn(4, 3, 8, 8)).sum().backward()


def recomputed() -> None:
    first, second = net(), nn.Linear(4, 4)
    second(checkpoint(first, torch.randn(2, 8), use_reentrant=False)).sum().backward()


def streamed() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i in range(dist.get_rank(), 40, dist.get_world_size()):
                yield torch.randn(8), i % 4

    model = DistributedDataParallel(net())
    for x, y in DataLoader(Stream(), batch_size=2):
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


def sampled() -> None:
    model, state = DistributedDataParallel(net()), torch.zeros(1, 8)
    for _ in range(3):
        choice = torch.distributions.Categorical(logits=model(state))
        action = choice.sample()  # type: ignore[no-untyped-call]
        choice.log_prob(action).sum().backward()  # type: ignore[no-untyped-call]
        state = state + (1.0 if action.item() == 1 else -1.0)


def closures() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss  # type: ignore[return-value]

    optimizer.step(closure)  # type: ignore[no-untyped-call]


def shared_metrics() -> None:
    loss = loss_of(DistributedDataParallel(net()))
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    if sum(losses) / len(losses) > 100:
        print("the losses are large")


def on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model).to_empty(device="cpu")
    for layer in model.children():
        layer.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


TRAININGS: list[Callable[[], None]] = [
    *(epochs, finite_checks, accumulated, best_model, mixed_precision, averaged_weights),
    *(schedulers, early_stop, evaluation, resumed, adversaries, contrasted, padded, images),
    *(recomputed, streamed, sampled, closures, shared_metrics, on_meta),
]
