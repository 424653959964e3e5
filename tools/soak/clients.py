"""Clients that ask at the same time: at random until they are told to stop, or everything once."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tools.soak.asker import TIMEOUT_S, Asker
from tools.soak.questions import Answer, Question
from tools.soak.tally import Tally, ask_and_compare


class Clients:
    """So many threads, each asking one question after another until told to stop."""

    def __init__(
        self, asker: Asker, references: dict[Question, Answer], tally: Tally, *, n: int, seed: int
    ) -> None:
        self._asker, self._references, self._tally = asker, references, tally
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-client-{index}"),), daemon=True)
            for index in range(n)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when the answers under way have come."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def _run(self, rng: random.Random) -> None:
        questions = list(self._references)
        while not self._stop.is_set():
            question = rng.choice(questions)
            is_streamed = rng.random() < 0.5
            has_come = ask_and_compare(
                self._asker, question, self._references[question], self._tally, is_streamed=is_streamed
            )
            if not has_come:
                self._stop.wait(1)  # the server may be gone
            elif rng.random() < 0.1:
                self._stop.wait(rng.uniform(0, 0.5))  # else the queue is never empty


def ask_everything(asker: Asker, references: dict[Question, Answer], tally: Tally, n_clients: int) -> None:
    """Every question once whole and once streamed, by so many clients."""
    todo = [(question, is_streamed) for question in references for is_streamed in (False, True)]
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                question, is_streamed = todo.pop()
            ask_and_compare(asker, question, references[question], tally, is_streamed=is_streamed)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fill_contexts(asker: Asker, n_slots: int) -> None:
    """An answer that fills it in each server slot, all at once: a cache takes memory when it is used."""

    def fill(slot: int) -> None:
        asker.client.completions.create(
            model="any", prompt="def", max_tokens=1 << 20, temperature=0.0,
            extra_body={"id_slot": slot, "ignore_eos": True},
        )  # fmt: skip

    with ThreadPoolExecutor(n_slots) as pool:
        list(pool.map(fill, range(n_slots)))
