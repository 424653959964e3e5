"""Training a drafter into a model: who sees whom, where the adapter acts, what is saved, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import convert_mtp_to_gguf
import gguf_to_hf
import train_mtp

from pyspac.model import mtp
from pyspac.model.gguf_header import read_header
from pyspac.train.packages import missing_packages

MODELS = ROOT / "pyspac" / "models"
TARGET, DRAFT, ADAPTER = (MODELS / f"demo-{name}.gguf" for name in ("moe", "draft", "mtp"))
MISSING = missing_packages(train_mtp.PACKAGES)
needs_train = pytest.mark.skipif(bool(MISSING), reason=MISSING)
train = [pytest.mark.train, needs_train]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target as a Hugging Face folder."""
    made = tmp_path_factory.mktemp("demo-hf")
    gguf_to_hf.write_folder(TARGET, made)
    return made


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    import torch

    from tools.train_mtp.base import load_base

    torch.set_num_threads(1)
    return load_base(folder)


@pytest.fixture
def adapter(base: Any) -> Any:
    """With changes that matter in every projection, as after training; its hooks are gone afterwards."""
    import torch

    from tools.train_mtp.adapter import GatedLora

    torch.manual_seed(0)
    made = GatedLora(base, [300, 301, 302], rank=4)
    with torch.no_grad():
        for b in made.b.values():
            b.normal_(std=0.1)
    yield made
    made.detach()


def layout(ids: list[list[int]], anchors: list[list[int]], mask_ids: list[int]) -> Any:
    import torch

    from tools.train_mtp.layout import make_layout

    return make_layout(torch.tensor(ids), torch.tensor(anchors), mask_ids)


IDS, ANCHORS = [[5, 6, 7, 8, 9, 10]], [[1, 2]]


class TestLayout:
    pytestmark = train

    def test_masks_follow_their_anchor(self) -> None:
        """Text 0..5, two masks behind the anchors 1 and 2."""
        made = layout(IDS, ANCHORS, [300, 301])
        assert made.ids.tolist() == [[5, 6, 7, 8, 9, 10, 300, 301, 300, 301]]
        assert made.positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 3, 4]]
        assert made.mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2, 1, 2]]
        assert made.teachers.tolist() == [[[2, 3], [3, 4]]]

    def test_who_sees_whom(self) -> None:
        sees = layout(IDS, ANCHORS, [300, 301]).attention[0, 0]
        for i in range(6):  # the text: what is before, and no mask
            assert sees[i].nonzero().flatten().tolist() == list(range(i + 1))
        assert [sees[i].nonzero().flatten().tolist() for i in range(6, 10)] == [
            [0, 1, 6],
            [0, 1, 6, 7],
            [0, 1, 2, 8],
            [0, 1, 2, 8, 9],
        ]

    def test_anchors_are_where_the_model_said_its_best(self) -> None:
        import torch

        from tools.train_mtp.texts import Texts, choose_anchors

        greedy = torch.zeros(2, 12, dtype=torch.bool)
        greedy[:, [4, 6, 7, 11]] = True  # the last one has no room for masks behind it
        texts = Texts(torch.zeros(2, 12, dtype=torch.int64), greedy, 4)
        generator = torch.Generator().manual_seed(0)
        rows = torch.tensor([0, 1, 1])
        assert choose_anchors(texts, rows, 2, 3, generator).tolist() == [[3, 5, 6]] * 3
        many = choose_anchors(texts, rows, 2, 10, generator)
        assert many.tolist() == [list(range(10))] * 3


class TestGate:
    pytestmark = train

    def test_the_text_is_computed_as_without_an_adapter(self, base: Any, adapter: Any) -> None:
        """Its logits depend neither on the adapter's values nor on which masks there are.

        Apart from rounding: which experts the masks choose decides how many rows each of their products has.
        """
        import torch

        from tools.train_mtp.adapter import forward

        made = layout(IDS, ANCHORS, adapter.mask_ids)
        with torch.no_grad():
            seen = forward(base, adapter, made)[:, :6]
            for weight in (*adapter.b.values(), adapter.embedding):
                weight.mul_(-3)
            changed = forward(base, adapter, made)[:, :6]
            other = forward(base, adapter, layout(IDS, ANCHORS, [7, 8, 9]))[:, :6]
            alone = base.model(made.ids[:, :6]).logits
        for logits in (changed, other, alone):
            torch.testing.assert_close(logits, seen, rtol=1e-4, atol=1e-4)

    def test_gate_off_is_the_model_itself(self, base: Any, adapter: Any) -> None:
        import torch

        ids = torch.tensor([[5, 6, 300, 301]])
        with torch.no_grad():
            with adapter.at(torch.zeros_like(ids)):
                closed = base.model(ids).logits
            with adapter.at(torch.tensor([[0, 0, 1, 2]])):
                opened = base.model(ids).logits
            outside = base.model(ids).logits
            adapter.detach()
            without = base.model(ids).logits
        assert torch.equal(closed, without)
        assert torch.equal(outside, without)
        torch.testing.assert_close(opened[:, :2], without[:, :2], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(opened[:, 2:], without[:, 2:], atol=0.1)

    def test_a_group_is_as_if_its_masks_went_on_from_the_text(self, base: Any, adapter: Any) -> None:
        """The second of two groups, against a row that ends with its anchor and has only its masks."""
        import torch

        from tools.train_mtp.adapter import forward

        with torch.no_grad():
            both = forward(base, adapter, layout(IDS, ANCHORS, adapter.mask_ids))
            one = forward(base, adapter, layout([IDS[0][:3]], [[2]], adapter.mask_ids))
        torch.testing.assert_close(both[:, -3:], one[:, -3:], rtol=1e-4, atol=1e-4)

    def test_only_the_adapter_learns(self, base: Any, adapter: Any) -> None:
        from tools.train_mtp.adapter import forward
        from tools.train_mtp.run import mask_loss
        from tools.train_mtp.sampler import Sampler

        made, sampler = layout(IDS, ANCHORS, adapter.mask_ids), Sampler(base.n_vocab)
        mask_loss(forward(base, adapter, made), made, sampler).backward()
        assert all(p.grad is None for p in base.model.parameters())
        learns = [*adapter.parameters(), sampler.next]
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learns)

    def test_mask_ids_are_no_special_tokens(self, base: Any) -> None:
        from tools.train_mtp.adapter import choose_mask_ids

        assert choose_mask_ids(base, 4) == [3067, 3068, 3069, 3070]  # 3071 ends a text


class TestReport:
    pytestmark = train

    def test_tokens_per_step_by_hand(self) -> None:
        """right right | wrong | right: steps of 3, 1 and 2 tokens; with one mask of 2, 1 (the text ends)."""
        import torch

        from pyspac.train.accepted import tokens_per_step

        right = torch.tensor([[[1, 1], [0, 0], [0, 0], [0, 1], [1, 0]]]) > 0
        assert tokens_per_step(right, 2) == 2
        assert tokens_per_step(right, 1) == pytest.approx((2 + 1 + 1 + 2) / 4)

    def test_a_sampler_chooses_as_at_run_time(self) -> None:
        import torch

        from tools.train_mtp.sampler import Sampler

        torch.manual_seed(0)
        sampler = Sampler(50, rank=4)
        sampler.next.data.normal_(std=2)
        previous, after = (x.detach().half().numpy() for x in (sampler.previous, sampler.next))
        at_run_time = mtp.MtpSampler(mtp.N_TOP, previous, after)
        logits, before = torch.randn(20, 50), torch.randint(50, (20,))
        here = sampler.rerank(logits, before).tolist()
        assert here == [at_run_time.rerank(x.numpy(), int(p)) for x, p in zip(logits, before, strict=True)]
        assert here != logits.argmax(-1).tolist()


class TestWholeRun:
    pytestmark = train

    def test_train_stop_go_on_convert(
        self,
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A second of training learns nothing of use, and leaves a file in llama.cpp's order and shapes."""
        from tools.train_mtp import run

        monkeypatch.setattr(run, "N_HELD_OUT", 2)
        text = tmp_path / "text.py"
        text.write_text((ROOT / "scripts" / "convert_to_gguf.py").read_text() * 12)
        work, out = tmp_path / "work", tmp_path / "out.gguf"
        args = [str(folder), "--work-dir", str(work), "--text", str(text), "--masks", "2", "--rank", "2"]
        args += ["--texts", "4", "--rows", "1", "--groups", "4"]
        assert train_mtp.main([*args, "--minutes", "0.01"]) == 0
        assert "tokens per step" in capsys.readouterr().out
        assert train_mtp.main([*args, "--minutes", "0.02"]) == 0
        assert convert_mtp_to_gguf.main([str(work), str(TARGET), str(out)]) == 0
        adapter = mtp.read_adapter(out)
        assert (adapter.n_masks, adapter.mask_ids, adapter.base) == (2, (3069, 3070), mtp.base_id(TARGET))
        self.check_matrices(work, out)
        assert "not known" not in capsys.readouterr().out
        before = (work / "adapter.pt").read_bytes()
        assert train_mtp.main([*args, "--minutes", "1", "--lr", "1e30"]) == 2
        assert "give a smaller --lr than 1e+30" in capsys.readouterr().err
        assert (work / "adapter.pt").read_bytes() == before
        (work / "adapter.pt").write_bytes(before[:1000])
        assert train_mtp.main([*args, "--minutes", "1"]) == 2
        assert "adapter.pt cannot be read" in capsys.readouterr().err
        (work / "adapter.pt").write_bytes(before)
        self.check_stopping(args, work, monkeypatch)
        assert convert_mtp_to_gguf.main([str(work), str(TARGET), str(out)]) == 0
        assert "whose worth is not known" in capsys.readouterr().out
        out.unlink()
        assert convert_mtp_to_gguf.main([str(work), str(DRAFT), str(out)]) == 2
        assert "trained for a model of architecture 'qwen3moe'" in capsys.readouterr().err
        assert list(tmp_path.glob("*.gguf")) == []
        assert train_mtp.main([*args, "--rank", "3"]) == 2
        assert "use another --work-dir" in capsys.readouterr().err

    def check_stopping(self, args: list[str], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C while training decides about the sampler as the end does; a second one leaves that open."""
        import torch

        from tools.train_mtp import run

        def interrupted(training: run.Run) -> float:
            training.interrupt()
            return 0.0

        def impatient(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(run.Run, "learn", interrupted)
        assert train_mtp.main([*args, "--minutes", "1"]) == 130
        assert torch.load(work / "adapter.pt")["has_sampler"] in (True, False)
        monkeypatch.setattr(run, "finish", impatient)
        assert train_mtp.main([*args, "--minutes", "1"]) == 130
        assert torch.load(work / "adapter.pt")["has_sampler"] is None

    def check_matrices(self, work: Path, out: Path) -> None:
        """What llama.cpp will compute from the file is what was trained: embeddings, and one projection."""
        import torch
        from gguf import GGUFReader

        saved = torch.load(work / "adapter.pt")["adapter"]
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(out).tensors}
        rows, columns = (tensors[f"token_embd.weight.lora_{side}"] for side in "ab")
        np.testing.assert_allclose(rows[[3069, 3070]] @ columns.T, saved["embedding"], atol=1e-3)
        a, b = (tensors[f"blk.3.attn_v.weight.lora_{side}"] for side in "ab")
        name = "model/layers/3/self_attn/v_proj"
        np.testing.assert_allclose(b @ a, saved[f"b.{name}"] @ saved[f"a.{name}"], atol=1e-3)


@pytest.mark.train
@needs_train
def test_the_folder_of_a_gguf_says_what_the_gguf_says(base: Any) -> None:
    from llama_helpers import llama, loaded_model, new_context

    text = "import os\n\n\ndef main(path: str) -> int:\n    return 12\n"
    ids = base.tokenizer.encode(text).ids
    with loaded_model(TARGET) as model, new_context(model) as ctx:
        vocab, tokens = llama.llama_model_get_vocab(model), (llama.llama_token * 64)()
        n = llama.llama_tokenize(vocab, text.encode(), len(text), tokens, 64, False, False)
        assert tokens[:n] == ids
        assert llama.llama_decode(ctx, llama.llama_batch_get_one(tokens, n)) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(ctx, -1), (base.n_vocab,)).copy()
    import torch

    with torch.no_grad():
        here = base.model(torch.tensor([ids])).logits[0, -1].numpy()
    assert here.argmax() == logits.argmax()
    np.testing.assert_allclose(here, logits, atol=0.3)  # llama.cpp rounds activations to 8 bits


# ---------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no/such/folder"], "there is no folder no/such/folder"),
        (["{tmp}"], "there is no config.json"),
        (["{tmp}", "--masks", "0"], "--masks is 0; it must be 1 to 16"),
        (["{tmp}", "--groups", "200"], "--groups is 200; it must be at most"),
        (["{tmp}", "--minutes", "0"], "--minutes is 0"),
        (["{tmp}", "--minutes", "nan"], "--minutes is nan"),
        (["{tmp}", "--lr", "inf"], "--lr is inf"),
        (["{tmp}", "--text", "no/such/text"], "there is no no/such/text"),
    ],
)
@pytest.mark.train
@needs_train
def test_bad_training_input(
    args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ["--work-dir", str(tmp_path / "work")]
    assert train_mtp.main([arg.format(tmp=tmp_path) for arg in args] + work) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.train
@needs_train
@pytest.mark.parametrize("of_gpu", [True, False])
def test_too_little_memory_is_said(
    of_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from tools.train_mtp import run

    def load(_: Path) -> None:
        if of_gpu:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has ...")
        torch.empty(1 << 60)

    monkeypatch.setattr(run, "load_base", load)
    assert train_mtp.main([str(tmp_path), "--groups", "10", "--rows", "3"]) == 1
    said = capsys.readouterr().err
    assert ("Tried to allocate 3.00 GiB" if of_gpu else "can't allocate memory") in said
    assert (
        "--rows 3 * (192 + --groups 10 * --masks 4) = 696 tokens; give a smaller --groups or --rows" in said
    )


@pytest.mark.train
@needs_train
def test_texts_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pyspac.train.corpus import read_modules

    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.py").write_text((ROOT / "scripts" / "convert_to_gguf.py").read_text() * 12)
    assert {m.name.partition("#")[0] for m in read_modules(tmp_path)} == {"text.py"}
    assert "left out 1 of the 2 files" in capsys.readouterr().err
    read_modules(tmp_path / "text.py")
    assert capsys.readouterr().err == ""


def test_what_training_needs_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_mtp, "PACKAGES", ("json", "no_such_package"))
    assert train_mtp.main(["folder"]) == 2
    assert "no_such_package is not installed" in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused() -> None:
    adapter, model = read_header(ADAPTER), read_header(TARGET)
    convert_mtp_to_gguf.check_fits(adapter, model)
    with pytest.raises(convert_mtp_to_gguf.UserError, match="architecture 'qwen3moe'"):
        convert_mtp_to_gguf.check_fits(adapter, read_header(DRAFT))
    smaller = tuple(t for t in model.tensors if not t.name.startswith("blk.5."))
    with pytest.raises(convert_mtp_to_gguf.UserError, match=r"blk\.5\.attn_k\.weight .* is missing"):
        convert_mtp_to_gguf.check_fits(adapter, type(model)(model.path, model.metadata, smaller))


def test_a_special_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert convert_mtp_to_gguf.main([str(tmp_path), str(TARGET), str(fifo)]) == 2
    assert "no file that could be replaced" in capsys.readouterr().err
    assert fifo.is_fifo()


@pytest.mark.train
@needs_train
def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.gguf")
    assert convert_mtp_to_gguf.main([str(tmp_path), str(TARGET), out]) == 2
    assert "give the --work-dir of scripts/train_mtp.py" in capsys.readouterr().err
    for name in ("adapter.pt", "config.json"):
        (tmp_path / name).write_text("no checkpoint")
    assert convert_mtp_to_gguf.main([str(tmp_path), str(TARGET), out]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    assert convert_mtp_to_gguf.main([str(tmp_path), str(tmp_path / "config.json"), out]) == 2


def test_a_folder_is_written_without_torch(tmp_path: Path) -> None:
    if missing := missing_packages(gguf_to_hf.PACKAGES):
        pytest.skip(missing)
    code = "import sys; sys.modules['torch'] = None; import gguf_to_hf; sys.exit(gguf_to_hf.main())"
    command = [sys.executable, "-c", code, str(TARGET), str(tmp_path / "folder")]
    subprocess.run(command, cwd=ROOT / "scripts", check=True)
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_another_architecture_has_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if missing := missing_packages(gguf_to_hf.PACKAGES):
        pytest.skip(missing)
    assert gguf_to_hf.main([str(DRAFT), str(tmp_path / "folder")]) == 2
    assert "the architecture is 'qwen3'" in capsys.readouterr().err
