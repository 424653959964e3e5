"""llama.cpp's drafters through libspac: plain decoding's text, every text begun anew, mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import input_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculation_near_ties import NEAR_TIE, margins
from typer.testing import CliRunner

from pyspac._native import check, ffi, lib
from pyspac.cli import app
from pyspac.commands.demo import DRAFT, TARGET, demo_prompt
from pyspac.errors import ConfigError, EngineError, ModelError, PyspacError, UsageError
from pyspac.generate.decode import Interrupt
from pyspac.generate.library_drafter import Handle, LibraryDrafter, TextDrafter
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.sampling import SamplingParams
from pyspac.generate.session import Session
from pyspac.generate.shadow import ShadowDrafter
from pyspac.generate.speculation_hook import SpeculationHook
from pyspac.model import spec_types
from pyspac.model.spec_types import parse_spec_type
from pyspac.speculation.manager import Speculation

TEXT_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
KINDS = (*TEXT_KINDS, "draft-simple", "ngram-simple,draft-simple", "ngram-map-k,ngram-mod,draft-simple")
N_PREDICT = 96


def options(spec_type: str, **fields: object) -> RunOptions:
    settings = {"n_predict": N_PREDICT, "n_threads": 1, "stock": True, "draft_max": 6} | fields
    draft = DRAFT if spec_types.needs_draft(spec_type) else None
    return RunOptions(model=TARGET, draft=draft, spec_type=spec_type, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with Session(options("none", draft_max=None)) as session:
        return session.generate(session.tokenize(demo_prompt())).token_ids


def check_is_plain(prompt: list[int], output: list[int], plain: list[int]) -> None:
    """Or departs from it at a near tie, as the width of a batch changes the rounding."""
    if output != plain:
        assert margins(prompt, output).max() < NEAR_TIE


# ---- names ---------------------------------------------------------------------------------------


def test_names_are_the_librarys() -> None:
    names = ffi.new("const char **")
    check(lib.spac_drafter_types(names))
    assert sorted(ffi.string(names[0]).decode().split(",")) == sorted(("none", *spec_types.LLAMA))


def test_lists_are_read() -> None:
    assert parse_spec_type(None) is None
    assert parse_spec_type("draft") == "draft"
    assert parse_spec_type(" ngram-mod, draft-simple,ngram-mod") == "ngram-mod,draft-simple"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eagle", "draft, ngram, draft-lora, none, or one or more of llama.cpp's: draft-simple"),
        ("ngram,draft-simple", "ngram stands alone"),
        ("none,ngram-mod", "none stands alone"),
        ("draft-simple,draft-mtp", "one of the draft- names"),
        ("", "cannot be ''"),
    ],
)
def test_wrong_names_are_errors(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_spec_type(text)
    assert caught.value.exit_code == 2


def test_what_a_name_needs() -> None:
    with pytest.raises(UsageError, match="needs a draft model: give one with -md"):
        RunOptions(model=TARGET, spec_type="ngram-mod,draft-simple")
    with pytest.raises(UsageError, match="uses no draft model"):
        RunOptions(model=TARGET, draft=DRAFT, spec_type="ngram-mod")
    with pytest.raises(UsageError, match="--draft-p-min"):
        RunOptions(model=TARGET, spec_type="ngram-mod", draft_p_min=0.5)
    with pytest.raises(ConfigError, match="pyspac serve"):
        RunOptions(model=TARGET, draft=DRAFT, spec_type="draft-dflash")


def test_files_that_cannot_draft_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no head that predicts further tokens") as caught:
        Session(RunOptions(model=TARGET, spec_type="draft-mtp", stock=True))
    assert caught.value.exit_code == 2
    with pytest.raises(ModelError, match="draft-eagle3 needs a draft that was trained for it"):
        Session(RunOptions(model=TARGET, draft=DRAFT, spec_type="draft-eagle3", stock=True))
    target = input_models.write_target(tmp_path / "target.gguf")
    other = input_models.write_other_vocab(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="another vocabulary"):
        Session(RunOptions(model=target, draft=other, spec_type="draft-simple", stock=True))


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculation", ["static", "auto"])
def test_greedy_text_is_plain_decodings(kind: str, speculation: str, plain: list[int]) -> None:
    """Twice in one session: the second text is drafted as the first, but for what ngram-mod remembers."""
    with Session(options(kind, speculation=speculation)) as session:
        prompt = session.tokenize(demo_prompt())
        first, second = session.generate(prompt), session.generate(prompt)
    for generation in (first, second):
        check_is_plain(prompt, generation.token_ids, plain)
    if speculation == "static":
        drafts = [[(s.n_draft, s.n_accepted) for s in g.metrics.steps] for g in (first, second)]
        assert sum(n for n, _ in drafts[0]) > 0
        assert drafts[0] == drafts[1] or "ngram-mod" in kind


@pytest.mark.model
@pytest.mark.parametrize("kind", ["ngram-map-k", "draft-simple"])
def test_in_a_split_model(kind: str, plain: list[int]) -> None:
    with Session(options(kind, stock=False, device="emulated", cache=CacheSize(text="25%"))) as session:
        prompt = session.tokenize(demo_prompt())
        generation = session.generate(prompt)
    check_is_plain(prompt, generation.token_ids, plain)
    assert generation.metrics.totals.n_draft > 0


@pytest.mark.model
def test_two_sessions_at_once(plain: list[int]) -> None:
    """Each token of the one is followed by one of the other."""
    with Session(options("ngram-map-k")) as one, Session(options("draft-simple")) as other:
        prompt = one.tokenize(demo_prompt())
        outputs: list[list[int]] = []

        def between(_token: int) -> None:
            if len(outputs) < 2:
                outputs.append(other.generate(prompt).token_ids)

        output = one.generate(prompt, between).token_ids
    for tokens in (output, *outputs):
        check_is_plain(prompt, tokens, plain)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["ngram-cache", "draft-simple"])
def test_broken_off_and_begun_again(kind: str, plain: list[int]) -> None:
    """By a signal in the prompt, and by an exception in the middle of a step."""

    def fail(token: int) -> None:
        if token == plain[7]:
            raise RuntimeError

    with Session(options(kind)) as session:
        prompt = session.tokenize(demo_prompt())
        interrupt = Interrupt()
        interrupt.is_set = True
        assert session.generate(prompt, interrupt=interrupt).stop_reason == "interrupted"
        with pytest.raises(RuntimeError):
            session.generate(prompt, fail)
        check_is_plain(prompt, session.generate(prompt).token_ids, plain)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["ngram-map-k4v", "draft-simple"])
def test_another_text_in_between(kind: str, plain: list[int]) -> None:
    with Session(options(kind)) as session:
        prompt = session.tokenize(demo_prompt())
        for tokens in (prompt, prompt[:20], prompt[:1] + prompt[20:], prompt):
            output = session.generate(tokens).token_ids
        check_is_plain(prompt, output, plain)


@pytest.mark.model
def test_sampled_drafts_count_as_certain() -> None:
    """They have no distribution; a text repeats with its seed."""
    sampling = SamplingParams(temp=0.8, seed=3)
    outputs = []
    for _ in range(2):
        with Session(options("draft-simple", sampling=sampling)) as session:
            prompt = session.tokenize(demo_prompt())
            outputs.append(session.generate(prompt).token_ids)
            assert isinstance(session.drafter, LibraryDrafter)
            session.drafter.keep(0)
            session.drafter.read(prompt[:9], 0)
            assert session.drafter.draft(prompt[:10], 3).probs is None
    assert outputs[0] == outputs[1]


def test_n_grams_are_watched_in_the_shadow() -> None:
    hook = SpeculationHook(Speculation("forecast", n_draft_max=4), TextDrafter(Handle("ngram-simple", 4)))
    assert isinstance(hook.drafter, ShadowDrafter)


# ---- the handle ----------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(TEXT_KINDS),
    texts=st.lists(
        st.tuples(st.integers(0, 90), st.lists(st.integers(0, 1), max_size=90), st.integers(0, 9)), max_size=4
    ),
)
@settings(max_examples=60, deadline=None)
def test_every_text_begins_anew(kind: str, texts: list[tuple[int, list[int], int]]) -> None:
    """After any texts a drafter says of one what a new one says; but for ngram-mod, which learns."""
    text = [0, 1, 1] * 40
    with Handle(kind, 5) as used, Handle(kind, 5) as new:
        for n_keep, tokens, n_accepted in texts:
            n = used.begin(n_keep)
            assert n <= n_keep
            used.process(tokens, n)
            used.accept(min(n_accepted, len(used.draft(1, n + len(tokens) // 2, 5))))
        if kind == "ngram-mod":
            return
        used.begin(0)
        drafts: list[list[int]] = []
        for handle in (used, new):
            handle.process(text[:100], 0)
            drafts.append(handle.draft(text[100], 100, 5))
            handle.process(text[100:], 100)
            drafts.append(handle.draft(text[0], len(text), 5))
        assert drafts[:2] == drafts[2:]


def test_the_shortest_texts() -> None:
    """llama.cpp's ngram-cache reads four tokens back, whether or not there are as many."""
    for kind in TEXT_KINDS:
        with Handle(kind, 4) as handle:
            assert handle.draft(1, 0, 4) == []
            for pos in range(4):
                handle.process([1], pos)
                found = handle.draft(1, pos + 1, 4)
                assert found == [] or pos == 3


def test_a_handle_refuses_nonsense() -> None:
    for types, n_max, says in (
        ("ngram", 4, "unknown speculative type: ngram"),
        ("", 4, "types is empty"),
        ("none", 4, "no drafter that can be opened"),
        ("draft-dflash", 4, "no drafter that can be opened"),
        ("ngram-mod", 0, "give 1 to"),
        ("ngram-mod", 257, "give 1 to"),
        ("draft-simple", 4, "needs the contexts of both models"),
        ("draft-mtp", 4, "needs the contexts of both models"),
    ):
        with pytest.raises(EngineError, match=says) as caught:
            Handle(types, n_max)
        assert caught.value.exit_code == 2
    with Handle("ngram-simple", 4) as handle:
        handle.process([1, 2, 3], 0)
        for call in (
            lambda: handle.process([1], 4),
            lambda: handle.process([-1], 3),
            lambda: handle.draft(1, 4, 2),
            lambda: handle.draft(-1, 3, 2),
            lambda: handle.accept(1),
            lambda: handle.begin(-1),
        ):
            with pytest.raises(EngineError):
                call()
        assert handle.draft(1, 3, 0) == []
    with pytest.raises(PyspacError, match="closed"):
        handle.draft(1, 3, 1)
    handle.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Model]]:
    folder = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        paths = (input_models.write_target(folder / "t.gguf"), input_models.write_draft(folder / "d.gguf"))
        target, draft = (stack.enter_context(Model(ModelParams(path=path))) for path in paths)
        yield target, draft


def contexts(pair: tuple[Model, Model], **sizes: int) -> tuple[Context, Context]:
    target, draft = (Context(model, ContextParams(n_ctx=256, n_ubatch=64, **sizes)) for model in pair)
    return target, draft


def test_a_prompt_longer_than_the_drafts_context(pair: tuple[Model, Model]) -> None:
    target, draft = contexts(pair)
    with target, draft, Handle("draft-simple", 4, target=target, draft=draft) as handle:
        for pos in range(0, 320, 64):
            handle.process([5 + pos % 7] * 64, pos)
        assert handle.draft(9, 320, 4) == []
        handle.process([9], 320)
        assert handle.begin(200) == 200
        assert len(handle.draft(9, 200, 4)) == 4
        assert len(handle.draft(9, 200, 2)) == 2
        handle.process([9] * 54, 200)
        assert len(handle.draft(9, 254, 4)) == 2  # to the end of the draft's context
        with pytest.raises(EngineError, match="a batch of 65 tokens"):
            handle.process([9] * 65, 100)


def test_closed_in_the_wrong_order(pair: tuple[Model, Model]) -> None:
    target, draft = contexts(pair)
    handle = Handle("draft-simple", 4, target=target, draft=draft)
    handle.process([4, 5], 0)
    target.close()
    with pytest.raises(PyspacError, match="close the drafter first"):
        handle.draft(6, 2, 4)
    draft.close()
    handle.close()
    with pytest.raises(PyspacError, match="a context of the drafter is closed"):
        Handle("draft-simple", 4, target=target, draft=draft)


def test_models_that_do_not_fit_are_refused(pair: tuple[Model, Model], tmp_path: Path) -> None:
    target, draft = contexts(pair)
    with target, draft:
        for types, says in (("draft-eagle3", "no EAGLE-3 draft"), ("draft-mtp", "no head")):
            with pytest.raises(EngineError, match=says) as caught:
                Handle(types, 4, target=target, draft=draft)
            assert caught.value.exit_code == 2
    other = input_models.write_other_vocab(tmp_path / "other.gguf")
    with Model(ModelParams(path=other)) as model:
        target, draft = contexts((pair[0], model))
        with target, draft, pytest.raises(EngineError, match="vocab"):
            Handle("draft-simple", 4, target=target, draft=draft)


def test_a_trace_of_the_draft_gate_needs_a_draft_model_that_drafts(tmp_path: Path) -> None:
    target = input_models.write_target(tmp_path / "target.gguf")
    draft = input_models.write_draft(tmp_path / "draft.gguf")
    names = ["-m", str(target), "-md", str(draft), "--spec-type", "draft-mtp", "--draft-gate"]
    result = CliRunner().invoke(app, ["trace", *names, "-p", "x", "-o", str(tmp_path / "t.parquet")])
    assert result.exit_code == 2
    assert "--spec-type draft sees" in " ".join(result.output.split())
