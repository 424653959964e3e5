"""Faults of requests: clients that go, server slots and LoRA adapters that change meanwhile."""

from __future__ import annotations

import contextlib

from tools.soak.asker import text_of
from tools.soak.faults.fault import Fault, FaultError
from tools.soak.questions import Question, adapter_scales
from tools.soak.tally import ask_and_compare


class Disconnect(Fault):
    name, resource = "disconnect", "client"
    what = "cuts clients off in mid-answer, streamed and not"

    def apply(self) -> bool:
        for _ in range(self.rng.randint(1, 4)):
            question = self.rng.choice(list(self.site.references))
            self.site.tally.asked()
            if self.rng.random() < 0.3:
                self._give_up(question)
            else:
                self._cut_stream(question)
        return True

    def _give_up(self, question: Question) -> None:
        """A whole answer that no client waits for."""
        with contextlib.suppress(Exception):  # the timeout; or it was quicker
            self.site.asker.open(question, timeout=self.rng.uniform(0.001, 0.1))
        self.site.tally.cut()

    def _cut_stream(self, question: Question) -> None:
        expected, text = self.site.references[question].text, ""
        try:
            with self.site.asker.open(question, stream=True) as stream:
                for n_left, chunk in zip(range(self.rng.randint(0, 6), -1, -1), stream, strict=False):
                    text += text_of(chunk)
                    if n_left == 0:
                        break
        except Exception as error:  # whatever the client raises
            self.site.tally.lost(f"{question.prompt!r}, to be cut off: {type(error).__name__}: {error}")
            return
        if expected.startswith(text):
            self.site.tally.cut()
        else:
            self.site.tally.different(f"{question.prompt!r}, cut off: {text!r}, not {expected!r}")


class Slots(Fault):
    """Of requests without adapters: a saved slot does not say under which one it was computed."""

    name, resource = "slots", "slots"
    what = "saves, restores and erases server slots"

    def apply(self) -> bool:
        for _ in range(self.rng.randint(1, 4)):
            self._act()
        return True

    def _act(self) -> None:
        slot = self.rng.randrange(self.site.n_slots - 1)
        saved = sorted(self.site.slots_folder.glob("slot-?"))  # each with a .dft of the draft model beside it
        action = self.rng.choice(("save", "save", "restore", "restore", "erase"))
        if action == "restore" and not saved:
            action = "save"
        name = self.rng.choice(saved).name if action == "restore" else f"slot-{self.rng.randrange(8)}"
        n_full = self.site.n_full_disks
        try:
            self.site.post(f"/slots/{slot}?action={action}", {"filename": name})
        except FaultError:
            if not self._was_full(n_full):
                raise
        if action == "save" and self._was_full(n_full):  # perhaps half of it
            (self.site.slots_folder / name).unlink(missing_ok=True)

    def _was_full(self, n_before: int) -> bool:
        return self.site.is_disk_full or self.site.n_full_disks != n_before


class Adapters(Fault):
    name, resource = "adapters", "adapters"
    what = "swaps the server's LoRA adapters, asks under each, and swaps back"

    def apply(self) -> bool:
        questions = [q for q in self.site.references if q.adapter is not None]
        for question in self.rng.sample(questions, 2):
            self._set(question.adapter)
            try:
                # llama-server keeps what it computed under other adapters if no request names any
                ask_and_compare(
                    self.site.asker, question, self.site.references[question], self.site.tally,
                    is_streamed=self.rng.random() < 0.5, names_adapter=False,
                    extra_body={"cache_prompt": False},
                )  # fmt: skip
            finally:
                self._set(None)
        return True

    def _set(self, adapter: int | None) -> None:
        self.site.post("/lora-adapters", adapter_scales(adapter, self.site.asker.n_adapters))
