"""`pyspac.Llama` beside `llama_cpp.Llama` on the same model: the same text and forms, and what is ours."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from eagle_models import write_demo_head
from gguf import GGUFReader
from serving import wait_for

import pyspac
from pyspac import Llama
from pyspac.engine.engine import Engine
from pyspac.errors import PyspacError
from pyspac.forward.loading import Loading

import llama_cpp  # isort: skip  # after ours, which say where libllama is
from llama_cpp import LlamaGrammar, llama_cpp as bindings  # isort: skip
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding  # isort: skip

MODELS = Path(pyspac.__file__).parent / "models"
MODEL, DRAFT = (str(MODELS / f"demo-{name}.gguf") for name in ("moe", "draft"))
PROMPT = "import os\n\n\ndef read_lines(path):\n"
SAME_KERNELS: dict[str, Any] = {"device": "emulated", "cache": "50%"}
QUIET: dict[str, Any] = {"verbose": False, "n_ctx": 256, "n_threads": 1}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}
LOOKUP = LlamaPromptLookupDecoding()


def id_of(fields: Any) -> str:
    """Without the address of an object, which differs from process to process."""
    return str(fields).replace(str(LOOKUP), "LOOKUP")


OWN_ROUNDING = (
    0.3  # of logits: the engine's own kernels round activations to 8 bits, see test_host_kernels.py
)
WIDTH_ROUNDING = 0.02  # as other kernels run for wider batches, in llama.cpp as well

pytestmark = pytest.mark.model


def as_in_the_file(model: str = MODEL, **fields: Any) -> Any:
    """A `llama_cpp.Llama` whose weights keep the file's layout, as the split's do.

    By default they need not: AMX has a layout and kernels of its own for Q8_0, too.
    """
    default = bindings.llama_model_default_params

    def params() -> Any:
        result = default()
        result.use_extra_bufts = False
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "llama_model_default_params", params)
        return llama_cpp.Llama(model, **fields)


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    llm = as_in_the_file(**QUIET)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def theirs_by_default() -> Iterator[Any]:
    llm = llama_cpp.Llama(MODEL, **QUIET)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    with Llama(MODEL, **QUIET, **SAME_KERNELS) as llm:
        yield llm


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def text(llm: Any, prompt: str = PROMPT, **fields: Any) -> str:
    return str(llm(prompt, **GREEDY | fields)["choices"][0]["text"])


# ---- the same answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"device": "auto", "stock": True},
        {"device": "emulated", "cache": "5%"},
        {"draft_model": LOOKUP, "draft_max": 1},
        {"n_gpu_layers": -1},
    ],
    ids=id_of,
)
def test_greedy_text_is_the_same(theirs: Any, theirs_by_default: Any, fields: dict[str, Any]) -> None:
    """Twice: the second time the prompt is in the context."""
    expected = theirs_by_default if "stock" in fields else theirs
    with Llama(MODEL, **QUIET | SAME_KERNELS | fields) as llm:
        for prompt in (PROMPT, PROMPT, "x = 1\n"):
            assert text(llm, prompt) == text(expected, prompt)


@pytest.mark.parametrize(
    ("fields", "rounding"),
    [
        ({"device": "none"}, OWN_ROUNDING),
        ({"device": "none", "draft_model": DRAFT}, OWN_ROUNDING),
        (SAME_KERNELS | {"draft_model": DRAFT}, WIDTH_ROUNDING),
        (SAME_KERNELS | {"draft_model": DRAFT, "draft_max": 3}, WIDTH_ROUNDING),
        (SAME_KERNELS | {"draft_model": LOOKUP}, WIDTH_ROUNDING),
        (SAME_KERNELS | {"draft_model": LOOKUP, "logits_all": True}, WIDTH_ROUNDING),
    ],
    ids=id_of,
)
def test_greedy_choices_differ_at_near_ties_alone(fields: dict[str, Any], rounding: float) -> None:
    """Whatever was chosen is what llama.cpp finds the best after the same tokens, but for rounding."""
    with Llama(MODEL, **QUIET | fields) as llm:
        prompt = llm.tokenize(PROMPT.encode())
        chosen = [token for token, _ in zip(llm.generate(list(prompt), temp=0.0), range(64), strict=False)]
    plain = as_in_the_file(logits_all=True, **QUIET)
    rows = logits(plain, prompt + chosen)[len(prompt) - 1 : -1]
    plain.close()
    assert (rows.max(axis=1) - rows[np.arange(len(chosen)), chosen]).max() < rounding


def logits(llm: Any, tokens: list[int]) -> np.ndarray:
    """Of the prompt's tokens in a batch, then one by one: [n, n_vocab]."""
    llm.reset()
    llm.eval(tokens[:20])
    for token in tokens[20:]:
        llm.eval([token])
    return np.array(llm.scores[: len(tokens)])


def test_logits_are_the_same_to_the_last_bit() -> None:
    plain = as_in_the_file(logits_all=True, **QUIET)
    tokens = plain.tokenize(PROMPT.encode() * 4)
    expected = logits(plain, tokens)
    plain.close()
    with Llama(MODEL, logits_all=True, **QUIET | SAME_KERNELS) as llm:
        assert np.array_equal(logits(llm, tokens), expected)
        assert llm.stats()["experts"]["n_hit"] > 0


def test_forms_of_answers(theirs: Any, ours: Any) -> None:
    """Completion and chat, whole and as streams, with stop words, a seed, and more."""
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def f"}]
    seeded = {"temperature": 0.9, "seed": 5, "max_tokens": 24}
    for llm_call in (
        lambda llm: [llm.create_completion(PROMPT, **GREEDY, stop=["\n\n"], echo=True)],
        lambda llm: [llm(PROMPT, **seeded, repeat_penalty=1.2)],
        lambda llm: [llm.create_chat_completion(messages, **seeded)],
        lambda llm: list(llm(PROMPT, **GREEDY, stream=True)),
        lambda llm: list(llm.create_chat_completion(messages, **seeded, stream=True)),
    ):
        answers = [[without_ids(answer) for answer in llm_call(llm)] for llm in (theirs, ours)]
        assert answers[0] == answers[1]


def test_grammar_and_bias(theirs: Any, ours: Any) -> None:
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    assert text(ours, grammar=grammar) == text(theirs, grammar=grammar) in ("yes", "no")
    forbidden = {next(ours.generate(ours.tokenize(PROMPT.encode()), temp=0.0)): -1e9}
    assert text(ours, logit_bias=forbidden) == text(theirs, logit_bias=forbidden) != text(ours)


def test_seeded_text_with_drafts_is_that_without() -> None:
    """Each token is drawn by itself, so drafts change nothing."""
    seeded = {"temperature": 1.0, "seed": 3, "max_tokens": 48}
    with Llama(MODEL, **QUIET | SAME_KERNELS) as plain:
        expected = text(plain, **seeded)
    with Llama(MODEL, draft_model=DRAFT, draft_max=4, **QUIET | SAME_KERNELS) as llm:
        assert text(llm, **seeded) == expected
        assert llm.stats()["n_accepted"] > 0


def test_logprobs_with_drafts() -> None:
    """They need logits_all, as ever; the rows of drafts are in place."""
    fields = {"logits_all": True, **QUIET, **SAME_KERNELS}
    answers = []
    for draft in (None, LOOKUP):
        with Llama(MODEL, draft_model=draft, **fields) as llm:
            answers.append(llm(PROMPT, **GREEDY, logprobs=2)["choices"][0]["logprobs"])
    assert answers[0]["tokens"] == answers[1]["tokens"]
    np.testing.assert_allclose(
        answers[0]["token_logprobs"], answers[1]["token_logprobs"], atol=2 * WIDTH_ROUNDING
    )


def test_text_longer_than_a_batch_with_drafts() -> None:
    """llama_cpp.Llama's table of logits has room for one batch."""
    with Llama(MODEL, n_batch=32, draft_model=LOOKUP, **QUIET | SAME_KERNELS) as llm:
        answer = llm(PROMPT, **GREEDY | {"max_tokens": 120})
    assert answer["usage"]["completion_tokens"] == 120


def test_embeddings() -> None:
    fields = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN, **QUIET}
    plain = as_in_the_file(**fields)
    with Llama(MODEL, **fields, **SAME_KERNELS) as llm:
        assert llm.embed(["import os", "x"]) == plain.embed(["import os", "x"])
        assert llm.create_embedding("a")["data"][0]["object"] == "embedding"
    plain.close()


def test_tokens(theirs: Any, ours: Any) -> None:
    tokens = ours.tokenize(b"def f(self):\n    return 1")
    assert tokens == theirs.tokenize(b"def f(self):\n    return 1")
    assert ours.detokenize(tokens) == b"def f(self):\n    return 1"
    assert (ours.n_ctx(), ours.n_vocab(), ours.n_embd()) == (
        theirs.n_ctx(),
        theirs.n_vocab(),
        theirs.n_embd(),
    )


def test_lora_is_used(tmp_path: Path) -> None:
    """The layer whose experts it touches is llama.cpp's; logits change as they do there."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe")
    lora = str(gguf_models.write_expert_lora(tmp_path / "lora.gguf", "qwen3moe"))
    fields = {"lora_path": lora, "logits_all": True, **QUIET}
    plain = as_in_the_file(str(model), **fields)
    plain.eval([3, 4, 5, 6])
    with Llama(model, **fields, **SAME_KERNELS) as llm:
        llm.eval([3, 4, 5, 6])
        np.testing.assert_allclose(llm.scores[:4], plain.scores[:4], atol=1e-4)
        assert llm.stats()["layers"]["declined"] == {"a LoRA adapter touches the experts": 1}
    plain.close()


# ---- what is ours --------------------------------------------------------------------------------


def test_stats() -> None:
    with Llama(MODEL, draft_model=DRAFT, draft_max=4, **QUIET | SAME_KERNELS) as llm:
        before = llm.stats()
        text(llm)
        stats = llm.stats()
    assert before["n_steps"] == 0
    assert before["prompt_read_bytes"] is None  # where prompts end is not known here
    assert stats["mode"] == "split"
    assert stats["emulated"] is True
    assert (stats["n_ubatch"], stats["speculation"], stats["mtp"]) == (256, "static", None)  # n_ctx
    assert stats["layers"]["split"] == 6
    assert stats["experts"]["n_hit"] > 0
    assert stats["experts"]["n_loads"] > 0
    assert stats["scheduler"]["estimator"]
    assert 0 < stats["n_accepted"] <= stats["n_drafted"]
    assert stats["acceptance_length"] > 1


def test_first_of_several_generations_does_not_spoil_the_drafts() -> None:
    """The draft model's context follows when the prompt changes, also where a stream was left half-way."""
    with Llama(MODEL, draft_model=DRAFT, draft_max=4, **QUIET | SAME_KERNELS) as llm:
        fresh = text(llm)
        n_first = llm.stats()["n_accepted"]
        stream = llm("class A:\n", **GREEDY, stream=True)
        for _ in range(5):
            next(stream)
        stream.close()
        before = llm.stats()["n_accepted"]
        assert text(llm) == fresh
        assert llm.stats()["n_accepted"] - before == n_first


def test_an_object_says_itself_how_much_it_drafts() -> None:
    """It works as it does for llama_cpp.Llama: it gets the tokens so far, and may return none."""
    seen: list[list[int]] = []

    class Mine(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            seen.append(input_ids.tolist())
            return np.array(input_ids[-1:] if len(seen) % 2 else [], np.intc)

    with Llama(MODEL, draft_model=Mine(), **QUIET | SAME_KERNELS) as llm:
        prompt = llm.tokenize(PROMPT.encode())
        tokens = [token for token, _ in zip(llm.generate(list(prompt), temp=0.0), range(20), strict=False)]
        stats = llm.stats()
    assert stats["spec_type"] == "Mine"
    assert len(seen) - 1 <= 2 * stats["n_drafted"] <= len(seen) + 1
    assert seen[-1] == (prompt + tokens)[: len(seen[-1])]
    assert stats["n_steps"] + stats["n_accepted"] <= len(tokens)


def test_a_scheduler_decides_in_a_thread_of_its_own() -> None:
    """On the engine's board, while it is there; where there are no slots there is no thread."""
    before = threading.active_count()
    with Llama(MODEL, **QUIET, device="none") as llm:
        text(llm)
        assert threading.active_count() == before
    with Llama(MODEL, **QUIET | SAME_KERNELS) as llm:
        assert threading.active_count() == before + 1

        def n_decided() -> int:
            assert text(llm)
            return int(llm._engine.board.counters["n_decisions"][0])

        before_text = n_decided()
        wait_for("two more decisions", lambda: n_decided() > before_text + 1)
    assert threading.active_count() == before


def test_an_object_that_nobody_closed_holds_up_no_exit() -> None:
    """Python joins no thread once it has begun to end."""
    program = (
        "from pyspac import Llama\n"
        f"llm = Llama({MODEL!r}, **{QUIET | SAME_KERNELS!r})\n"
        "print(llm('def', max_tokens=2)['usage']['completion_tokens'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_two_at_once_close_in_any_order(theirs: Any) -> None:
    expected = text(theirs)
    first, second = (Llama(MODEL, **QUIET | SAME_KERNELS) for _ in range(2))
    assert [text(first), text(second)] == [expected, expected]
    first.close()
    first.close()
    assert text(second) == expected
    second.close()


def test_two_threads_with_one_each(theirs: Any) -> None:
    expected, texts = text(theirs), []

    def work() -> None:
        with Llama(MODEL, **QUIET | SAME_KERNELS) as llm:
            texts.append(text(llm))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected, expected]


def test_consumer_of_a_stream_fails(ours: Any, theirs: Any) -> None:
    def consume() -> None:
        for _ in ours(PROMPT, **GREEDY, stream=True):
            raise RuntimeError("the consumer's")

    with pytest.raises(RuntimeError, match="the consumer's"):
        consume()
    assert text(ours) == text(theirs)


def test_name_deleted_while_it_streams(theirs: Any) -> None:
    """The stream holds the object, and the last of them closes it."""
    llm = Llama(MODEL, **QUIET | SAME_KERNELS)
    stream = llm(PROMPT, **GREEDY, stream=True)
    parts = [next(stream)]
    del llm
    gc.collect()
    parts += stream
    assert "".join(part["choices"][0]["text"] for part in parts) == text(theirs)


def test_pickled_object_is_loaded_again() -> None:
    with Llama(MODEL, draft_model=DRAFT, **QUIET | SAME_KERNELS) as llm:
        copy = pickle.loads(pickle.dumps(llm))
    with copy:
        assert copy.stats()["draft"] == DRAFT
        assert copy.stats()["emulated"] is True
        assert text(copy)


def test_a_pickled_object_takes_as_many_tokens_at_once_as_pay_where_it_is_loaded() -> None:
    with Llama(MODEL, **QUIET) as llm:
        state = llm.__getstate__()
        assert state.keys().isdisjoint({"n_batch", "n_ubatch", "op_offload"})
    with Llama(MODEL, n_batch=32, **QUIET) as llm:
        assert llm.__getstate__()["n_batch"] == 32


@pytest.mark.parametrize("logits_all", [False, True])
def test_a_context_is_rounded_up_as_in_llama_cpp(logits_all: bool) -> None:
    with Llama(MODEL, logits_all=logits_all, **QUIET | {"n_ctx": 64}) as llm:
        assert llm.n_ctx() == llm.n_batch == 256
        prompt = llm.tokenize(PROMPT.encode() * 40)
        assert llm(prompt[:250], max_tokens=None)["usage"]["completion_tokens"] <= 6
        with pytest.raises(ValueError, match=r"exceed context window of 256"):
            llm(prompt[:300], max_tokens=1)


def test_the_models_own_context_is_rounded_up_too(tmp_path: Path) -> None:
    model = Path(shutil.copy(MODEL, tmp_path / "model.gguf"))
    reader = GGUFReader(model, "r+")
    reader.fields["qwen3moe.context_length"].parts[-1][0] = 300
    reader.data.flush()
    with Llama(str(model), draft_model=DRAFT, draft_max=8, **QUIET | {"n_ctx": 0}) as llm:
        assert llm.n_ctx() == 512
        prompt = llm.tokenize(PROMPT.encode() * 40)
        assert llm(prompt[:290], max_tokens=60)["usage"]["completion_tokens"] > 20


def test_vocabulary_alone() -> None:
    with Llama(MODEL, vocab_only=True, verbose=False) as llm:
        assert llm.detokenize(llm.tokenize(b"def")) == b"def"
        assert llm.stats() == {}
        message = {"role": "user", "content": "a"}
        for use in (
            lambda: llm("a"), lambda: llm.eval([1]), lambda: llm.generate([1]), lambda: llm.embed("a"),
            lambda: llm.create_chat_completion([message]),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"^vocab_only=True loads no weights"):
                use()


def test_closed_object_says_so() -> None:
    llm = Llama(MODEL, **QUIET | SAME_KERNELS)
    llm.close()
    llm.close()
    for use in (
        lambda: llm("a"), lambda: llm.eval([1]), lambda: llm.stats(), lambda: llm.generate([1]), llm.n_ctx,
        llm.save_state, llm.sample,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="closed: make a new one"):
            use()


def test_a_stream_whose_object_was_closed_says_so() -> None:
    llm = Llama(MODEL, **QUIET | SAME_KERNELS)
    stream = llm("def", max_tokens=8, stream=True)
    next(stream)
    llm.close()
    with pytest.raises(ValueError, match="closed: make a new one"):
        list(stream)


def test_an_object_without_a_model_is_an_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match="model_path"):
        Llama()
    gc.collect()
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`replace_llama_cpp` is undone after the test."""
    monkeypatch.setattr(llama_cpp, "Llama", llama_cpp.Llama)


@pytest.mark.usefixtures("put_back")
def test_libraries_get_ours() -> None:
    pyspac.replace_llama_cpp()
    from llama_cpp import Llama as imported

    assert imported is Llama
    pyspac.replace_llama_cpp(**SAME_KERNELS)
    from llama_cpp import Llama as with_defaults

    with with_defaults(MODEL, device=None, **QUIET) as llm:
        assert llm.stats()["emulated"] is True


@pytest.mark.usefixtures("put_back")
@pytest.mark.filterwarnings("ignore")
def test_langchain(theirs: Any) -> None:
    """Its classes for llama.cpp, which import `Llama` themselves; its argument `cache` is another thing."""
    llms = pytest.importorskip("langchain_community.llms", reason="langchain-community is not installed")
    chat_models = pytest.importorskip("langchain_community.chat_models")
    pyspac.replace_llama_cpp(**SAME_KERNELS)
    fields = {"model_path": MODEL, "temperature": 0.0, "repeat_penalty": 1.0, **QUIET}
    llm = llms.LlamaCpp(max_tokens=24, **fields)
    assert isinstance(llm.client, Llama)
    expected = text(theirs, max_tokens=24)
    assert llm.invoke(PROMPT) == "".join(llm.stream(PROMPT)) == expected
    assert llm.client.stats()["experts"]["n_hit"] > 0
    messages = [{"role": "user", "content": "def f"}]
    said = theirs.create_chat_completion(messages, temperature=0.0, max_tokens=8)["choices"][0]["message"]
    chat = chat_models.ChatLlamaCpp(max_tokens=8, **fields)
    assert chat.invoke([("user", "def f")]).content == said["content"]
    llm.client.close()
    chat.client.close()


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("/nowhere.gguf", {}, "Model path does not exist: /nowhere.gguf"),
        (str(MODELS), {}, "this is a folder"),
        (MODEL, {"cache": "10%", "device": "none"}, '^cache 10% needs a .* with device="emulated"$'),
        (MODEL, {"host_kernels": "ggml", "device": "none"}, 'out host_kernels="ggml", or add stock=True$'),
        (MODEL, {"cache": "much"}, "much"),
        (MODEL, {"device": "CUDA77"}, "there is no device"),
        (MODEL, {"draft_model": "/nowhere.gguf"}, "there is no such file"),
        (
            MODEL,
            {"mtp": "ADAPTER.gguf"},
            "^Llama has no mtp: .* `pyspac serve -m MODEL --mtp .* `pyspac run`",
        ),
        (MODEL, {"draft_model": 1}, "^draft_model cannot be 1: give the path of a GGUF file$"),
        (MODEL, {"draft_model": DRAFT, "draft_max": 99}, "^draft_max cannot be 99: .* from 1 to 15$"),
        (DRAFT, {"device": "emulated"}, r'\(device="none"\), or in plain llama.cpp \(stock=True\)'),
        (MODEL, {"draft_max": 3}, "^draft_max 3 .* model with draft_model, or LlamaPromptLookupDecoding"),
        (MODEL, {"n_threads": -1}, "^n_threads cannot be -1"),
        (MODEL, {"n_threads_batch": 10**6}, "^n_threads_batch cannot be 1000000: give a .* 1 to 512"),
        (MODEL, {"n_threads_batch": "x"}, "^n_threads_batch cannot be 'x'"),
        (
            MODEL,
            {"n_ctx": 10**9},
            "^n_ctx cannot be 1000000000: give at most 1024, .* [0-9]+ are free",
        ),
        (MODEL, {"n_ctx": 10**20}, "^n_ctx cannot be 1000.*: give a whole number from 0 to "),
        (MODEL, {"n_ctx": -1}, "^n_ctx cannot be -1: give a whole number from 0 to "),
        (MODEL, {"n_ctx": None}, "^n_ctx cannot be None: give a whole number from 0 to "),
        (MODEL, {"n_batch": -1}, "^n_batch cannot be -1: give a whole number from 1 to "),
        (MODEL, {"n_ubatch": 0}, "^n_ubatch cannot be 0: give a whole number from 1 to "),
        (MODEL, {"type_k": 99}, "^type_k cannot be 99: give llama_cpp.GGML_TYPE_F32, GGML_TYPE_F16"),
        (MODEL, {"type_v": "q8_0"}, "^type_v cannot be 'q8_0'"),
        (MODEL, {"lora_path": "/nowhere.gguf"}, "lora_path /nowhere.gguf: there is no such file"),
        (MODEL, {"lora_path": DRAFT}, "this file is no LoRA adapter of this model"),
    ],
)
def test_bad_input_is_a_value_error(model: str, fields: dict[str, Any], said: str) -> None:
    """As llama-cpp-python has it, and a PyspacError as well."""
    with pytest.raises(ValueError, match=said) as caught:
        Llama(model, **QUIET | fields)
    assert isinstance(caught.value, PyspacError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ""}, "^the prompt has no tokens, so nothing can follow it: give some text$"),
        ({"prompt": []}, "^the prompt has no tokens"),
        ({"prompt": None}, "^a prompt cannot be None: give text, or a list of tokens$"),
        ({"prompt": [5, 10**6]}, "^a token cannot be 1000000: give whole numbers from 0 to [0-9]+, as token"),
        ({"prompt": [-1]}, "^a token cannot be -1"),
        ({"prompt": ["a"]}, "^a token cannot be 'a'"),
        ({"temperature": float("nan")}, "^temperature cannot be nan: give a number from 0, which is greedy$"),
        ({"temperature": -0.5}, "^temperature cannot be -0.5"),
        ({"temperature": None}, "^temperature cannot be None"),
        ({"top_p": float("inf")}, "^top_p cannot be inf: give a number$"),
    ],
    ids=str,
)
def test_bad_input_of_a_call(ours: Any, fields: dict[str, Any], said: str, stream: bool) -> None:
    """At once: of a stream, before its first part is asked for."""
    with pytest.raises(ValueError, match=said):
        ours.create_completion(**{"prompt": PROMPT, "max_tokens": 2, "stream": stream, **fields})
    assert text(ours, max_tokens=2)  # it goes on


@pytest.mark.parametrize(
    "messages",
    [
        [], "hi", None, ["hi"], [{}], {"role": "user"}, [{"role": "user"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "hi"}}],
    ],
    ids=str,
)  # fmt: skip
def test_messages_that_are_none(ours: Any, messages: Any) -> None:
    for stream in (False, True):
        with pytest.raises(ValueError, match=r"^messages cannot be .*: give a list of"):
            ours.create_chat_completion(messages, stream=stream)


def test_a_message_of_parts_where_the_template_takes_text(ours: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for stream in (False, True):
        with pytest.raises(
            ValueError, match=r"^content cannot be \[.*: this model's chat template takes text"
        ):
            ours.create_chat_completion(messages, stream=stream)


def test_bad_tokens_of_the_parts(ours: Any) -> None:
    for call in (ours.eval, ours.generate, ours.detokenize):
        for token in (-1, ours.n_vocab(), 1.5):
            with pytest.raises(ValueError, match=f"^a token cannot be {token}:"):
                call([token])
    with pytest.raises(ValueError, match=r"^temp cannot be nan: give"):
        ours.generate([1], temp=float("nan"))
    with pytest.raises(ValueError, match=r"^the prompt has no tokens"):
        ours.generate([])
    ours.eval([5, 6])
    assert next(ours.generate([], reset=False, temp=0.0)) >= 0  # goes on where it is


def test_an_empty_prompt_where_the_model_begins_by_itself(theirs: Any, ours: Any) -> None:
    """As llama-cpp-python: with the token that begins a text."""
    for llm in (theirs, ours):
        llm._model.add_bos_token, kept = (lambda: True), llm._model.add_bos_token
        try:
            assert llm("", max_tokens=2, temperature=0.0)["usage"]["prompt_tokens"] == 1
        finally:
            llm._model.add_bos_token = kept


def test_threads_with_one_object_take_turns(ours: Any) -> None:
    """Each gets the text that it gets alone."""
    prompts = [PROMPT, "x = 1\n", "class Reader:\n"]
    expected = [text(ours, prompt) for prompt in prompts]
    found: dict[int, list[str]] = {}

    def run(i: int) -> None:
        found[i] = [text(ours, prompts[i]) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [expected[i]] * 3 for i in range(3)}


def test_a_stream_whose_context_has_another_text_ends_with_an_error(ours: Any) -> None:
    """Instead of going on with what the other one left."""
    stream = ours(PROMPT, **GREEDY, stream=True)
    next(stream)
    other = text(ours, "x = 1\n")
    with pytest.raises(PyspacError, match="another text was begun on this Llama"):
        list(stream)
    assert text(ours, "x = 1\n") == other


def test_a_head_is_for_the_command_line(tmp_path: Path) -> None:
    head = write_demo_head(tmp_path / "head.gguf", Path(MODEL))
    for fields, said in (
        ({"model_path": MODEL, "draft_model": head}, r"^draft_model .*: this draft \(eagle3\) reads hidden"),
        ({"model_path": head}, "cannot run by itself; give that model$"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            Llama(**QUIET | fields)
        assert "--" not in str(caught.value)


def test_model_that_cannot_take_back_tokens(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3next")
    with pytest.raises(ValueError, match="cannot take back"):
        Llama(model, draft_model=LOOKUP, **QUIET)
    with Llama(model, **QUIET) as llm:
        assert llm([5, 6, 7], max_tokens=3)["usage"]["completion_tokens"] > 0


# ---- experts that stay on disk -------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_a_file_that_gets_shorter_is_named(tmp_path: Path, draft: str | None) -> None:
    """Also a RuntimeError, as llama-cpp-python's own; once the file is whole again, it goes on."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(MODEL, path)
    # drafts of one length: the width decides how it rounds
    draft_max = 3 if draft else None
    with Llama(path, device="none", ram="6", draft_model=draft, draft_max=draft_max, **QUIET) as llm:
        expected = text(llm)
        os.truncate(path, path.stat().st_size // 3)
        with pytest.raises(PyspacError, match="the file has become shorter") as caught:
            text(llm, "something else entirely: 1, 2, 3")
        assert isinstance(caught.value, RuntimeError)
        shutil.copyfile(MODEL, path)
        assert text(llm) == expected
    with Llama(path, device="none", ram="6", embedding=True, **QUIET) as llm:
        os.truncate(path, path.stat().st_size // 3)
        with pytest.raises(PyspacError, match="the file has become shorter"):
            llm.embed(PROMPT)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ram": "6", "n_ctx": 1024}, 1024),  # every piece of a prompt reads the experts again
        ({"ram": "6"}, 512),  # llama_cpp.Llama's n_ctx
        ({"ram": "6", "n_ctx": 1024, "n_batch": 600}, 600),
        ({"stock": True, "n_ctx": 1024}, 512),
    ],
)
def test_as_many_tokens_at_once_as_pay(given: dict[str, Any], expected: int) -> None:
    with Llama(MODEL, device="none", verbose=False, **given) as llm:
        assert llm.n_batch == expected
        assert llama_cpp.llama_n_ubatch(llm.ctx) == expected


def test_slots_take_what_the_draft_model_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache="auto"` is what the device has free when the engine attaches, so all else is there by then."""
    order, attach, open_draft = [], Engine.attach, Loading.open_draft
    monkeypatch.setattr(Engine, "attach", lambda *args: (order.append("slots"), attach(*args))[1])
    monkeypatch.setattr(Loading, "open_draft", lambda *args: (order.append("draft"), open_draft(*args))[1])
    with Llama(MODEL, draft_model=DRAFT, **QUIET | SAME_KERNELS):
        assert order == ["draft", "slots"]


def test_values_of_several_devices_may_be_lists() -> None:
    with Llama(MODEL, **QUIET, device=["emulated"], cache=["50%"]) as llm:
        assert llm.stats()["device"] == "CPU"
        assert llm.stats()["experts"]["n_slots"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": ["CUDA0", 1]}, "device cannot be ['CUDA0', 1]: give a name, or a list"),
        ({"device": {"CUDA0": 1}}, "give a name, or a list with one for each device"),
        ({"device": 3}, "device cannot be 3"),
        ({"rpc": [50052]}, "rpc cannot be [50052]: give a name, or a list"),
        ({"rpc": ["host"]}, "rpc cannot be 'host': give HOST:PORT"),
        ({"cache": []}, "cache cannot be []: give a size, or a list"),
        ({"cache": ""}, "cache cannot be ''"),
        ({"rpc": []}, "rpc cannot be []: give a name, or a list"),
        ({"rpc": ""}, "rpc cannot be ''"),
        ({"rpc": ["[::1]:50052"]}, "as llama.cpp's RPC knows no IPv6"),
        ({"device": []}, "device cannot be []: give a name, or a list"),
        ({"device": ""}, "device cannot be ''"),
        ({"device": ["CUDA0", ""]}, "device cannot be ['CUDA0', '']"),
        ({"tensor_split": "3,1"}, "tensor_split 3,1 needs a device with layers, and there is none"),
        ({"tensor_split": ["1", "x"]}, "tensor_split cannot be '1,x': give a share of the layers"),
        ({"tensor_split": []}, "tensor_split cannot be []: give shares of the layers"),
        ({"cache": ["25%", None]}, "cache cannot be ['25%', None]"),
        ({"cache": True}, "cache cannot be True"),
        ({"cache": [1, 2], "device": "emulated"}, "cache 1,2 has 2 sizes, and there is one device"),
    ],
)
def test_what_is_no_value_of_devices(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        Llama(MODEL, **QUIET, **arguments)
    assert says in str(caught.value)
