"""Drafts by mask tokens (draft-lora): random adapters on random models, whose text is plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf_models
import numpy as np
import pytest
from llama_helpers import assert_same_bits
from mask_adapters import MASK_IDS, write_adapter
from near_ties import NEAR_TIE, margins
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.generate import masks
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.lora_drafter import LoraDrafter
from pyspac.generate.masks import Entry, MaskedDecoder, layout
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.sampling import SamplingParams
from pyspac.generate.session import Session
from pyspac.lab.trace import TokenStatus
from pyspac.lab.trace_file import read_trace
from pyspac.scheduler.routing_log import RoutingLog

PROMPT = "hello world, hello world, hello"
# sliding windows; an output matrix that is the embeddings'; biases and a norm of q and k
ARCHITECTURES = ("qwen3moe", "gpt-oss", "mixtral")
K = len(MASK_IDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(model, adapter) by architecture."""
    folder = tmp_path_factory.mktemp("masks")
    found = {}
    for name in ARCHITECTURES:
        model = gguf_models.write_model(folder / f"{name}.gguf", name)
        found[name] = model, write_adapter(folder / f"{name}-mtp.gguf", model)
    return found


# ---- one pass


def test_layout_by_hand() -> None:
    assert layout([30, 31], 7, [5, 6]) == [
        Entry(30, 7, (0, 1, 2)), Entry(31, 8, (0, 2)),
        Entry(5, 8, (1,)), Entry(6, 9, (1,)),
        Entry(5, 9, (2,)), Entry(6, 10, (2,)),
    ]  # fmt: skip
    assert layout([30], 7, []) == [Entry(30, 7, (0,))]


@contextmanager
def decoding(model: Path, adapter: Path, n_draft_max: int = 4) -> Iterator[MaskedDecoder]:
    n = n_draft_max
    params = ContextParams(n_ctx=256, n_ubatch=64, n_outputs_max=(n + 1) * (K + 1), n_groups=n + 1)
    loaded = Model(ModelParams(path=model, use_extra_bufts=False))
    with loaded, Context(loaded, params) as context, MaskedDecoder(context, adapter, MASK_IDS) as decoder:
        yield decoder


def passes(decoder: MaskedDecoder) -> list[tuple[np.ndarray, np.ndarray]]:
    """(anchors' logits, masks' logits) of passes of all widths, some tokens of which are taken back."""
    context, rng = decoder.context, np.random.default_rng(3)
    context.decode([*range(3, 40), *MASK_IDS])  # ids of masks, which are none here
    found = []
    for n_draft in (0, 4, 1, 3, 2, 0, 4):
        n_past = context.n_past
        tokens = [int(token) for token in rng.integers(3, 250, 1 + n_draft)]
        anchors, behind = decoder.decode(tokens, K if n_draft != 3 else 2)
        found.append((anchors.copy(), behind.copy()))
        context.rollback(n_past + 1 + int(rng.integers(0, 1 + n_draft)))
        found.append((context.decode([9, 10], 2).copy(), np.zeros((1, 1), np.float32)))  # and plain steps
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ordinary_tokens_are_the_models_own_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches with the adapter and without it.

    Widths choose kernels, so they have to be equal; and the experts are no quantised ones, as those kernels
    look at how many of the batch's tokens, masks among them, chose the same expert.
    """
    model = gguf_models.write_model(tmp_path / "model.gguf", name, [gguf_models.Type.F32])
    files = model, write_adapter(tmp_path / "mtp.gguf", model)
    with decoding(*files) as decoder:
        with_adapter = passes(decoder)
    monkeypatch.setattr(masks, "_set_adapter", lambda context, path: None)
    with decoding(*files) as decoder:
        without = passes(decoder)
    for i, (row, base) in enumerate(zip(with_adapter, without, strict=True)):
        assert_same_bits(row[0], base[0], f"{name}, pass {i}")
        if row[1].size > 1:
            assert (np.abs(row[1] - base[1]).max(axis=2) > 0.1).all(), "a mask is an ordinary token"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_adapter_whose_gate_is_off_changes_no_bit(models: dict[str, tuple[Path, Path]], name: str) -> None:
    """Against a context as plain decoding has it: another number of sequences, and no adapter."""
    model, adapter = models[name]
    params = ContextParams(n_ctx=256, n_ubatch=64, n_outputs_max=25)
    batches = [range(3, 40), MASK_IDS, [30], [31, 32, 33], range(40, 60)]
    with Model(ModelParams(path=model, use_extra_bufts=False)) as loaded, Context(loaded, params) as context:
        plain = [context.decode(batch, len(batch) if len(batch) < 26 else 1).copy() for batch in batches]
    with decoding(model, adapter) as decoder:
        for i, batch in enumerate(batches):
            logits = decoder.context.decode(batch, len(plain[i]))
            assert_same_bits(logits.copy(), plain[i], f"{name}, batch {i}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_group_sees_its_anchor_and_its_own_masks(models: dict[str, tuple[Path, Path]], name: str) -> None:
    """What a group computes does not depend on what else is in the pass, but for rounding."""
    tokens = [30, 31, 32, 33, 34]
    with decoding(*models[name]) as decoder:
        context = decoder.context
        context.decode(range(3, 40))
        start = context.n_past
        together = decoder.decode(tokens, K)[1].copy()
        for j in range(len(tokens)):
            context.rollback(start)
            decoder.truncate(start)
            if j:
                context.decode(tokens[:j])
            alone = decoder.decode([tokens[j]], K)[1][0]
            assert (
                np.abs(together[j] - alone).max() < 0.1 * alone.std()
            )  # a mask that it must not see: more than 0.5
            context.rollback(start + j)
            decoder.truncate(start + j)
            shorter = decoder.decode([tokens[j]], 2)[1][0]
            assert np.abs(shorter - alone[:2]).max() < 0.1 * alone.std()


# ---- whole runs


class Oracle(LoraDrafter):
    """Drafts what plain decoding says, and now and then something else: masks and batches are real."""

    text: Sequence[int] = ()

    def _read(self, tokens: Sequence[int], n_max: int) -> list[int]:
        drafted = super()._read(tokens, n_max)
        right = list(self.text[len(tokens) : len(tokens) + len(drafted)])
        drafted[: len(right)] = right
        if drafted and len(tokens) % 3 == 0:
            drafted[len(tokens) % len(drafted)] ^= 1
        return drafted


def options_of(models: dict[str, tuple[Path, Path]], name: str, **fields: object) -> RunOptions:
    model, adapter = models[name]
    base = {"n_threads": 1, "n_predict": 40, "mtp": adapter, "draft_max": 4}
    return RunOptions(model=model, **(base | fields))  # type: ignore[arg-type]


def as_oracle(session: Session, text: Sequence[int]) -> LoraDrafter:
    drafter = session.drafter
    assert isinstance(drafter, LoraDrafter)
    drafter.__class__ = Oracle
    drafter.text = text  # type: ignore[attr-defined]
    return drafter


def plain_text(models: dict[str, tuple[Path, Path]], name: str) -> list[int]:
    """Prompt and greedy output of plain stock decoding."""
    options = options_of(models, name, stock=True, mtp=None, draft_max=None, n_predict=60)
    with Session(options) as session:
        prompt = session.tokenize(PROMPT)
        return [*prompt, *session.generate(prompt).token_ids]


WAYS = {
    "stock": {"stock": True},
    "cpu": {"device": "cpu", "cache": CacheSize(text="40%")},
    "none": {"device": "none"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft_max", [1, 4])
def test_greedy_text_is_plain_decodings(
    models: dict[str, tuple[Path, Path]], name: str, way: str, draft_max: int
) -> None:
    text = plain_text(models, name)
    with Session(options_of(models, name, draft_max=draft_max, **WAYS[way])) as session:
        as_oracle(session, text)
        prompt = session.tokenize(PROMPT)
        found = [session.generate(prompt) for _ in range(2)]
        if way == "cpu":
            assert session.split is not None
            assert session.split.layers_dict()["split"] > 0
    near = 0.05 if way == "none" else NEAR_TIE  # the engine's kernels round otherwise than stock's
    for generation in found:
        assert len(generation.token_ids) == 40
        assert margins(models[name][0], prompt, generation.token_ids).max() < near
        steps = generation.metrics.steps
        assert steps[0].n_draft == 0  # nothing was drafted yet
        assert all(step.n_masks == (1 + step.n_draft) * draft_max for step in steps[:-4])
        assert all(step.n_others == 0 for step in steps)
        assert 0 < generation.metrics.totals.n_accepted < generation.metrics.totals.n_draft


def test_unlikely_drafts_cost_no_text(models: dict[str, tuple[Path, Path]]) -> None:
    """The random adapter's own, of which none may hold."""
    with Session(options_of(models, "qwen3moe", stock=True)) as session:
        prompt = session.tokenize(PROMPT)
        generation = session.generate(prompt)
    assert generation.metrics.totals.n_draft > 100
    assert margins(models["qwen3moe"][0], prompt, generation.token_ids).max() < NEAR_TIE


def test_turns_keep_the_context(models: dict[str, tuple[Path, Path]]) -> None:
    """The second prompt goes on from the first's answer, the third from the middle of it."""
    with Session(options_of(models, "qwen3moe", stock=True)) as session:
        first = session.tokenize(PROMPT)
        answer = session.generate(first).token_ids
        for prompt in ([*first, *answer, 30, 31], [*first, *answer[:20], 40, 41], [*first[:9], 50]):
            generation = session.generate(prompt)
            assert generation.metrics.n_cached >= len(prompt) - 3
            # some processors' kernels round a context that was kept otherwise than a prompt in one piece
            assert margins(models["qwen3moe"][0], prompt, generation.token_ids).max() < 60 * NEAR_TIE


def test_masks_leave_room_at_the_end_of_the_context(models: dict[str, tuple[Path, Path]]) -> None:
    text = plain_text(models, "qwen3moe")
    with Session(options_of(models, "qwen3moe", stock=True, n_ctx=64, n_predict=-1)) as session:
        as_oracle(session, text)
        generation = session.generate(session.tokenize(PROMPT))
        prompt = session.tokenize(PROMPT)
    assert generation.stop_reason == "context"
    assert len(prompt) + len(generation.token_ids) == 65
    n_past = len(prompt)
    for step in generation.metrics.steps:
        assert n_past + step.n_tokens <= 64
        n_past += step.n_emitted
    assert generation.metrics.steps[-1].n_masks == 0
    assert margins(models["qwen3moe"][0], prompt, generation.token_ids).max() < NEAR_TIE


def test_speculation_that_is_off_has_no_masks(models: dict[str, tuple[Path, Path]]) -> None:
    with Session(options_of(models, "qwen3moe", stock=True, draft_max=None, speculation="off")) as session:
        steps = session.generate(session.tokenize(PROMPT)).metrics.steps
    assert all(step.is_plain and step.n_tokens == 1 for step in steps)


def test_a_controller_chooses(models: dict[str, tuple[Path, Path]]) -> None:
    """Whatever it chooses, tokens and masks fit each other, and the text is the model's."""
    text = plain_text(models, "qwen3moe")
    options = options_of(models, "qwen3moe", device="cpu", draft_max=None, speculation="cascade",
                         cache=CacheSize(text="40%"))  # fmt: skip
    with Session(options) as session:
        as_oracle(session, text)
        prompt = session.tokenize(PROMPT)
        generation = session.generate(prompt)
        assert session.speculation is not None
        widths = session.speculation.shared.table.passes.widths()
    assert any(step.is_plain for step in generation.metrics.steps)
    assert any(step.n_draft for step in generation.metrics.steps)
    assert max(widths) > 4
    assert margins(models["qwen3moe"][0], prompt, generation.token_ids).max() < NEAR_TIE


def test_the_engine_learns_nothing_from_masks(models: dict[str, tuple[Path, Path]]) -> None:
    with Session(options_of(models, "qwen3moe", device="cpu")) as session:
        assert session.split is not None
        board = session.split.engine.board
        session.generate(session.tokenize(PROMPT))  # the first forwards of a context may be split or not
        before, n_rows = board.counts.copy(), rows_of(board)
        steps = session.generate(session.tokenize(PROMPT)).metrics.steps
        counted = (board.counts - before).sum(axis=1)
        computed = rows_of(board) - n_rows
    n_prompt = 1  # the rest of the prompt was kept
    anchors = n_prompt + sum(1 + step.n_draft for step in steps)
    assert set(counted.tolist()) == {anchors * board.n_expert_used}
    assert set(computed.tolist()) == {(anchors + sum(s.n_masks for s in steps)) * board.n_expert_used}


def test_the_routing_log_has_no_masks(models: dict[str, tuple[Path, Path]]) -> None:
    """Their rows are there, without the token that a mask's id means elsewhere."""
    options = options_of(models, "qwen3moe", device="cpu", n_predict=6, cache=CacheSize(text="40%"))
    with Session(options) as session:
        assert session.split is not None
        prompt = session.tokenize(PROMPT)
        log = RoutingLog(session.split.engine.board)
        steps = session.generate(prompt).metrics.steps
        tokens, _ = log.read()
    assert (tokens < 0).sum() == sum(step.n_masks for step in steps) > 0
    assert (tokens >= 0).sum() == len(prompt) + sum(1 + step.n_draft for step in steps)


def rows_of(board: object) -> np.ndarray:
    stats = board.layer_stats  # type: ignore[attr-defined]
    return (stats["n_device_rows"] + stats["n_host_rows"]).astype(np.int64)


def test_sampled_text_repeats_with_its_seed(models: dict[str, tuple[Path, Path]]) -> None:
    sampling = SamplingParams(temp=0.8, seed=5)
    texts = []
    for _ in range(2):
        with Session(options_of(models, "qwen3moe", stock=True, sampling=sampling)) as session:
            texts.append(session.generate(session.tokenize(PROMPT)).token_ids)
    assert texts[0] == texts[1]


def test_a_trace_has_no_masks(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = models["qwen3moe"]
    out = tmp_path / "trace.parquet"
    arguments = ["trace", "-m", str(model), "--mtp", str(adapter), "-p", PROMPT, "-n", "12", "-o", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--no-display", "--draft-max", "2"])
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert (
        int((trace.status == TokenStatus.SAMPLED).sum() + (trace.status == TokenStatus.ACCEPTED).sum()) == 11
    )
    assert int((trace.status == TokenStatus.REJECTED).sum()) > 0


# ---- what is refused


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["run", "-p", "x", "-n", "4", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_what_is_refused(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = models["qwen3moe"]
    assert "trained on another model" in refused("-m", models["mixtral"][0], "--mtp", adapter)
    ordinary = write_adapter(tmp_path / "lora.gguf", model, is_gated=False)
    assert "no adapter with mask tokens" in refused("-m", model, "--mtp", ordinary)
    experts = write_adapter(tmp_path / "ffn.gguf", model, extra=("blk.0.ffn_gate_inp.weight",))
    assert "act on masks only" in refused("-m", model, "--mtp", experts)
    beyond = write_adapter(tmp_path / "beyond.gguf", model, mask_ids=[5, gguf_models.N_VOCAB])
    assert "a mask has the id 259" in refused("-m", model, "--mtp", beyond)
    assert "give one with --mtp" in refused("-m", model, "--spec-type", "draft-lora")
    assert "leave out --mtp" in refused("-m", model, "--spec-type", "ngram", "--mtp", adapter)
    assert "leave out one of them" in refused("-m", model, "--mtp", adapter, "--stock")


def test_run_makes_room_for_all_masks_that_are_asked_for(tmp_path: Path) -> None:
    """8 drafts and as many masks behind each: more tokens than a step of an ordinary drafter has."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe")
    adapter = write_adapter(tmp_path / "mtp.gguf", model, mask_ids=range(3, 11))
    arguments = ["run", "-m", model, "--mtp", adapter, "--draft-max", "8", "-p", PROMPT, "-n", "8", "-t", "1"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--device", "emulated", "--cache", "40%"])
    assert result.exit_code == 0, result.output


def test_adapters_and_heads_are_told_apart(models: dict[str, tuple[Path, Path]]) -> None:
    """--mtp and --spec-type draft-mtp sound alike: whoever mixes them up is told which is which."""
    model, adapter = models["qwen3moe"]
    both = refused("-m", model, "--mtp", adapter, "--spec-type", "draft-mtp")
    assert "draft-mtp means the head that a model has built in: leave one of them out" in both
    assert "needs no head, but --mtp alone" in refused("-m", model, "--spec-type", "draft-mtp")
    assert "give a draft or a head with -md" in refused("-m", model, "--mtp", model)
    wrong = refused("-m", model, "-md", adapter, "--spec-type", "draft-mtp")
    assert "an adapter with mask tokens, not a model; give it with --mtp" in wrong
    built_in = "a head that the model has built in needs none: --spec-type draft-mtp"
    assert built_in in refused("-m", model, "--spec-type", "draft-lora")


def test_a_model_that_cannot_keep_masks_apart_is_refused(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3next")
    adapter = write_adapter(tmp_path / "mtp.gguf", model)
    assert "recurrent layers" in refused("-m", model, "--mtp", adapter)


def test_more_masks_than_a_pass_may_have_are_left_out(tmp_path: Path) -> None:
    """--draft-max caps them: the first masks of an adapter do without the others."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe")
    adapter = write_adapter(tmp_path / "mtp.gguf", model, mask_ids=range(3, 43))
    options = RunOptions(model=model, mtp=adapter, draft_max=15, n_predict=8, n_threads=1, device="cpu",
                         cache=CacheSize(text="40%"))  # fmt: skip
    with Session(options) as session:
        steps = session.generate(session.tokenize(PROMPT)).metrics.steps
    assert steps[1].n_tokens <= 256
    assert options.effective_draft_max == 15
