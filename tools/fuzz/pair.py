"""A case's two contexts, and what each operation does to both and demands of them.

The other side is stock where ggml's kernels compute the experts ("slots"). With experts on disk the engine's
own kernels compute them, so the other side has an engine as well, with everything in memory: of types that
have no kernels in a pool with room for all, as only the engine computes these there.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from pyspac.engine.board import NO_BUDGET
from pyspac.engine.engine import Engine, EngineParams
from pyspac.errors import EngineError
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header
from tools.fuzz.contexts import Batch, Context, Logits, llama
from tools.fuzz.models import N_VOCAB
from tools.fuzz.plan import N_SEQ, Json
from tools.system_faults import SystemFaults

ABORTED: Final = 2  # llama_decode
NO_ROOM: Final = 1
WAIT_MS: Final = 60_000
IN_MEMORY: Final[dict[str, Json]] = {  # the engine of the other side
    "ram": {"device": "none", "cache": "0"},
    "both": {"device": "cpu", "cache": "20%", "fill": False, "host_kernels": "spac", "max_batch": 64},
}


class Mismatch(Exception):
    """The two sides differ, or an operation did what it must not."""


class ProgramCallback:
    """The program's own abort callback: counts how often it is asked, and says stop after so many."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.limit: int | None = None
        self.has_stopped = False
        self.function = llama.ggml_abort_callback(self._ask)

    def _ask(self, _data: Any) -> bool:
        self.n_asked += 1
        if self.limit is not None and self.n_asked > self.limit:
            self.has_stopped = True
        return self.has_stopped

    @contextmanager
    def armed(self, limit: int | None) -> Iterator[None]:
        self.n_asked, self.limit, self.has_stopped = 0, limit, False
        yield
        self.limit, self.has_stopped = None, False


class Pair:
    """The context with the engine, the other, and what is in force."""

    def __init__(self, split: Context, stock: Context, case: Json, faults: SystemFaults, model: str) -> None:
        self.split, self.stock, self.both = split, stock, (split, stock)
        self.mode, self.faults = case["mode"], faults
        self.experts_bytes = read_geometry(read_header(Path(model))).experts_bytes
        self.settings = case["context"]
        self.engine: Engine | None = None
        self.other_engine: Engine | None = None
        self.callback = ProgramCallback()
        self.has_callback = False
        self.has_shift = False  # llama.cpp moves keys in the next decode
        self.may_fail = False  # a read that failed, or fails just now
        self.is_faulty = False  # the disk
        self.thread_every = 0  # of the next attach
        self.saved: dict[int, tuple[int, bytes, bytes]] = {}  # place -> (sequence, states)
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self.faults.set(thread_every=0, read_every=0, short_every=0, slow_every=0, lie_every=0)
        self.do_free({})

    def do(self, operation: Json) -> None:
        """Raises Mismatch."""
        method: Callable[[Json], None] = getattr(self, f"do_{operation['op']}")
        method(operation)

    # ---- the engine

    def do_attach(self, arguments: Json) -> None:
        if self.engine is not None:
            self.do_free({})
        thread_every, self.thread_every = self.thread_every, 0
        self.faults.set(thread_every=thread_every)
        try:
            self.engine = Engine.attach(self.split.ctx, self._params(arguments["fields"]))
        except EngineError as error:
            self.counts["attach_refused"] += 1
            is_too_small = "cannot hold the experts of one layer" in str(error)
            if not is_too_small and not thread_every:
                raise Mismatch(f"attaching failed: {error}") from error
            return
        finally:
            self.faults.set(thread_every=0)
        if self.mode in IN_MEMORY:
            self._attach_other()

    def _attach_other(self) -> None:
        fields = IN_MEMORY[self.mode]
        if self.stock.is_on_disk:
            fields = fields | {"ram": "100%"}
        with self.faults.paused():
            self.other_engine = Engine.attach(self.stock.ctx, self._params(fields))

    def _params(self, fields: Json) -> EngineParams:
        """`ram` of a plan is a share of all experts' bytes."""
        fields = dict(fields)
        share = int(fields.pop("ram", "0%").removesuffix("%"))
        return EngineParams(**fields, ram_bytes=self.experts_bytes * share // 100)

    def do_no_threads(self, arguments: Json) -> None:
        self.thread_every = arguments["every"]

    def do_free(self, _arguments: Json) -> None:
        if self.engine is not None:
            self.engine.end_forward()
            n_steals = int(self.engine.board.counters[0]["n_pinned_steals"])
            self.engine.close()
            if n_steals:
                raise Mismatch(f"{n_steals} slots in use were given to others")
        if self.other_engine is not None:
            self.other_engine.close()
        self.engine = self.other_engine = None
        self.may_fail = self.is_faulty

    def do_plan(self, arguments: Json) -> None:
        if self.engine is None or not self.engine.info().n_slots:
            return
        board, rng = self.engine.board, np.random.default_rng(arguments["seed"])
        split = np.flatnonzero(board.expert_bytes)
        keys = (split[:, None] * board.n_expert + np.arange(board.n_expert)).ravel()
        with board.decision():
            board.utility[:] = rng.integers(0, 256, board.utility.shape, dtype=np.uint8)
            board.tau[:] = rng.integers(64, 192, board.tau.shape, dtype=np.uint8)
            board.load[: len(keys)] = rng.permutation(keys).astype(np.uint32)
            board.n_load[0] = len(keys)
            board.byte_budget[:] = NO_BUDGET
        if arguments["then"] != "nothing":
            self.engine.apply()
        if arguments["then"] == "wait":
            self.engine.wait_idle(WAIT_MS)

    def do_look(self, _arguments: Json) -> None:
        """What others may read at any time."""
        if self.engine is not None:
            self.engine.info()
            self.engine.tier()
            self.engine.declined()
            self.engine.take_spans()

    # ---- decoding

    def do_decode(self, arguments: Json) -> None:
        self._decode(self._batch(arguments), limit=None)

    def do_cancel(self, arguments: Json) -> None:
        """Moving keys must not be stopped: llama.cpp would not do it again."""
        self.do_callback({"is_set": True})
        self._decode(self._batch(arguments), limit=None if self.has_shift else arguments["after"])

    def _batch(self, arguments: Json) -> Batch:
        tokens: list[int] = []
        pos: list[int] = []
        seq: list[int] = []
        for part in arguments["parts"]:
            first = self.stock.range(part["seq"])[1]
            rng = np.random.default_rng(part["seed"])
            tokens += rng.integers(3, N_VOCAB, part["n"]).tolist()
            pos += range(first, first + part["n"])
            seq += [part["seq"]] * part["n"]
        rng = np.random.default_rng(len(tokens))
        outputs = {
            "all": [True] * len(tokens),
            "none": [False] * len(tokens),
            "last": [False] * (len(tokens) - 1) + [True],
            "some": (rng.random(len(tokens)) < 0.5).tolist(),
        }[arguments["outputs"]]
        return Batch(tokens, pos, seq, outputs)

    def _decode(self, batch: Batch, limit: int | None) -> None:
        with self.callback.armed(limit):
            status, split = self.split.decode(batch)
            n_asked, has_stopped = self.callback.n_asked, self.callback.has_stopped
        with self.faults.paused():
            expected_status, expected = self.stock.decode(batch)
        if expected_status != 0:
            self._check_no_room(status, expected_status)
            return
        self.has_shift = False
        self.counts["decodes"] += 1
        if self.has_callback and n_asked == 0 and status == 0:
            raise Mismatch("the program's abort callback was not asked")
        if status != 0:
            self._check_failure(status, has_stopped)
            self._take_back(batch)
            return
        self.may_fail = self.is_faulty
        if has_stopped:
            raise Mismatch("the program's abort callback said stop, and llama_decode returned 0")
        self._compare(split, expected)

    def _check_no_room(self, status: int, expected: int) -> None:
        """Neither has decoded; both begin anew."""
        if status != expected or expected != NO_ROOM:
            raise Mismatch(f"llama_decode returned {status}, and stock's {expected}")
        self.counts["no_room"] += 1
        self._clear()

    def _check_failure(self, status: int, has_stopped: bool) -> None:
        self.counts["cancelled" if has_stopped else "read_failed"] += 1
        if has_stopped and status != ABORTED and not self.may_fail:
            raise Mismatch(f"the program stopped a decode, and llama_decode returned {status}")
        if not has_stopped and not self.may_fail:
            text = self.engine.tier().error if self.engine else "no engine"
            raise Mismatch(f"llama_decode returned {status} though nothing was to fail ({text})")
        if not has_stopped:
            self.may_fail = self.is_faulty

    def _take_back(self, batch: Batch) -> None:
        """Stock decoded what the other did not: none of it stays, as llama.cpp itself did there.

        Where llama.cpp cuts the batch into several, a part may have been decoded, and what comes next lies in
        other cells, which are added up in another order; a recurrent state cannot go back. Both begin anew.
        """
        settings, n_seq = self.settings, len(set(batch.seq))
        is_cut = len(batch.tokens) > settings["n_ubatch"] or (n_seq > 1 and not settings["is_unified"])
        if self.stock.is_recurrent or is_cut:
            self._clear()
            return
        for seq in dict.fromkeys(batch.seq):
            self.stock.remove(seq, batch.pos[batch.seq.index(seq)], -1)
        self._check_ranges()

    def _clear(self) -> None:
        for context in self.both:
            context.clear()
        self.has_shift = False

    def _check_ranges(self) -> None:
        for seq in range(N_SEQ):
            ours, expected = self.split.range(seq), self.stock.range(seq)
            if ours != expected:
                raise Mismatch(f"sequence {seq} has positions {ours}, and stock's {expected}")

    def _compare(self, split: Logits, expected: Logits) -> None:
        self.counts["rows"] += len(expected)
        if not np.isfinite(expected).all():
            raise Mismatch("stock's logits are not finite: the case compares nothing")
        differing = (split.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
        if differing.any():
            error = float(np.abs(split - expected).max())
            raise Mismatch(
                f"{differing.sum()} of {len(expected)} rows of logits differ, by up to {error:.3g}, "
                f"first row {int(np.argmax(differing))}"
            )

    # ---- the memory of both

    def do_seq_rm(self, arguments: Json) -> None:
        seq = arguments["seq"]
        first, end = self.stock.range(seq)
        n = end - first
        begin, stop = first + int(n * arguments["begin"]), first + int(n * arguments["end"])
        if begin >= stop:
            return
        done = [context.remove(seq, begin, -1 if stop == end else stop) for context in self.both]
        if done[0] != done[1]:
            raise Mismatch(f"llama_memory_seq_rm returned {done[0]}, and stock's {done[1]}")
        if not done[0]:  # of a recurrent model: all or nothing
            for context in self.both:
                context.remove(seq, -1, -1)

    def do_seq_cp(self, arguments: Json) -> None:
        for context in self.both:
            context.remove(arguments["to"], -1, -1)
            llama.llama_memory_seq_cp(context.memory, arguments["seq"], arguments["to"], -1, -1)

    def do_shift(self, arguments: Json) -> None:
        """Tokens after the first are dropped, and the rest moves up."""
        first, end = self.stock.range(arguments["seq"])
        n_kept, n_dropped = (int((end - first) * arguments[key]) for key in ("begin", "share"))
        if n_dropped == 0 or not llama.llama_memory_can_shift(self.stock.memory):
            return
        begin = first + n_kept
        for context in self.both:
            if not context.remove(arguments["seq"], begin, begin + n_dropped):
                return
        for context in self.both:
            llama.llama_memory_seq_add(context.memory, arguments["seq"], begin + n_dropped, -1, -n_dropped)
        self.has_shift = True

    def do_save(self, arguments: Json) -> None:
        seq = arguments["seq"]
        states = self.split.save(seq), self.stock.save(seq)
        if states[0] != states[1]:
            raise Mismatch(
                f"the states of sequence {seq} differ ({len(states[0])} and {len(states[1])} bytes)"
            )
        self.saved[arguments["place"]] = (seq, *states)

    def do_restore(self, arguments: Json) -> None:
        if arguments["place"] not in self.saved:
            return
        seq, split, stock = self.saved[arguments["place"]]
        target = arguments["to"] if seq >= 0 else -1
        read = [
            self.split.restore(stock if arguments["is_crossed"] else split, target),
            self.stock.restore(stock, target),
        ]
        if read[0] != read[1]:
            raise Mismatch(f"{read[0]} bytes of a state were restored, and {read[1]} of stock's")
        if read[0] == 0:
            self._clear()
        self._check_ranges()

    # ---- settings

    def do_lora(self, arguments: Json) -> None:
        for context in self.both:
            context.set_adapters(arguments["scales"])

    def do_threads(self, arguments: Json) -> None:
        for context in self.both:
            llama.llama_set_n_threads(context.ctx, arguments["n"], arguments["n_batch"])

    def do_callback(self, arguments: Json) -> None:
        self.has_callback = arguments["is_set"]
        function = self.callback.function if self.has_callback else llama.ggml_abort_callback()
        llama.llama_set_abort_callback(self.split.ctx, function, ctypes.c_void_p(0))

    def do_disk(self, arguments: Json) -> None:
        kind, every = arguments["kind"], arguments["every"]
        self.is_faulty = kind in ("fail", "short")
        self.may_fail = self.may_fail or self.is_faulty
        self.faults.set(
            read_every=every if kind == "fail" else 0,
            short_every=every if kind == "short" else 0,
            slow_every=every if kind == "slow" else 0,
            lie_every=every if kind == "lie" else 0,  # a planted defect, in no seed's list
            slow_us=2000,
        )
