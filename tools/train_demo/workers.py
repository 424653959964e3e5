"""One process per core, each with its own windows; parameters and gradients live in shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from tools.train_demo.common import N_CTX, ROWS_PER_STEP, SEED
from tools.train_demo.data import Windows
from tools.train_demo.distillation import Pair
from tools.train_demo.optimiser import OptimConfig, is_muon, lr_factor, update_adam, update_muon


def flat_views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The pieces of a flat buffer in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    return [piece.view_as(p) for piece, p in zip(flat.split(sizes), parameters, strict=True)]


def split_work(parameters: list[nn.Parameter], n_worker: int) -> list[set[int]]:
    """Which worker updates which parameter: largest first, each to the worker with least so far."""
    owned: list[set[int]] = [set() for _ in range(n_worker)]
    load = [0] * n_worker
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = load.index(min(load))
        owned[rank].add(i)
        load[rank] += parameters[i].numel()
    return owned


@dataclass
class Shared:
    """What all workers see. Flat buffers are [n_parameter] float32; `control` is [progress, step, stop]."""

    params: Tensor
    m: Tensor
    v: Tensor
    grads: list[Tensor]  # one per worker, written by that worker only
    report: Tensor  # [n_worker, 4] float32
    control: Tensor  # float64, written by worker 0 between the barriers only
    tokens: Tensor  # [n_token] int64
    barrier: Barrier
    n_vocab: int

    def state(self) -> dict[str, Tensor]:
        return {"params": self.params, "m": self.m, "v": self.v}


class Worker:
    def __init__(self, rank: int, shared: Shared, optim: OptimConfig) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.rank, self.shared, self.optim = rank, shared, optim
        self.pair = Pair(shared.n_vocab)
        self.names, self.parameters = map(list, zip(*self.pair.named_parameters(), strict=True))
        self.m, self.v = (flat_views(x, self.parameters) for x in (shared.m, shared.v))
        self.grads = [flat_views(g, self.parameters) for g in shared.grads]
        for p, view, grad in zip(
            self.parameters, flat_views(shared.params, self.parameters), self.grads[rank], strict=True
        ):
            p.data, p.grad = view, grad
        self.owned = split_work(self.parameters, len(shared.grads))[rank]
        self.windows = Windows(shared.tokens, SEED)

    def step(self) -> bool:
        """One optimiser step together with the other workers; False when worker 0 asked to stop."""
        self.shared.barrier.wait(timeout=600)
        progress, step, is_stop = self.shared.control.tolist()
        if is_stop:
            return False
        self.backward(int(step), is_short=progress < self.optim.long_from)
        self.shared.barrier.wait(timeout=600)
        self.update(lr_factor(self.optim, progress), int(step))
        self.shared.barrier.wait(timeout=600)  # worker 0 may now save or report whole parameters
        return True

    def backward(self, step: int, is_short: bool) -> None:
        n_worker = len(self.shared.grads)
        self.shared.grads[self.rank].zero_()
        rows = [self.windows(step * ROWS_PER_STEP + i) for i in range(self.rank, ROWS_PER_STEP, n_worker)]
        batch = torch.stack(rows)
        n_token = N_CTX // 2 if is_short else N_CTX
        ids, labels = (x.reshape(-1, n_token) for x in (batch[:, :-1], batch[:, 1:]))
        loss, self.shared.report[self.rank] = self.pair.losses(ids, labels, self.optim)
        (loss * (len(rows) / ROWS_PER_STEP)).backward()

    @torch.no_grad()
    def update(self, factor: float, step: int) -> None:
        for i in sorted(self.owned):
            p, m = self.parameters[i].data, self.m[i]
            g = sum(grads[i] for grads in self.grads)
            if is_muon(self.names[i], p):
                update_muon(p, g, m, self.optim, factor)
            else:
                update_adam(p, g, m, self.v[i], self.optim, factor, step)


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed blocks rather than hand them back: the page faults cost a third of a step."""
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1)):
            mallopt(option, value)


def worker_main(rank: int, shared: Shared, optim: OptimConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # worker 0 hears it and asks everybody to stop
    worker = Worker(rank, shared, optim)
    while worker.step():
        pass


def make_shared(tokens: Tensor, n_vocab: int, n_worker: int) -> Shared:
    torch.manual_seed(SEED)
    start = torch.cat([p.data.flatten() for p in Pair(n_vocab).parameters()])
    zeros = [torch.zeros_like(start) for _ in range(2 + n_worker)]
    for x in (start, tokens, *zeros):
        x.share_memory_()
    return Shared(
        params=start,
        m=zeros[0],
        v=zeros[1],
        grads=zeros[2:],
        tokens=tokens,
        n_vocab=n_vocab,
        report=torch.zeros(n_worker, 4).share_memory_(),
        control=torch.zeros(3, dtype=torch.float64).share_memory_(),
        barrier=mp.get_context("spawn").Barrier(n_worker),
    )
