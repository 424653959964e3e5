"""What we use of llama.cpp that is not public: the table holds all of it, and the check finds what moved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pyspac.forward.model import EXPERT_TENSORS
from tools.patches.pin import read_pin
from tools.patches.pristine import pristine_tree
from tools.patches.queue import read_patches
from tools.pin_check.__main__ import main
from tools.pin_check.names import has_word, look_up, read_table
from tools.pin_check.scratch import apply_patch, apply_patches, copy_tree
from tools.pin_check.sources import compile_one, includes_llama, read_commands

TREE = ROOT / "build" / "llama.cpp"
TABLE = read_table()
NAMES = {name for use in TABLE for name in use.names}
ENGINE = [path for kind in ("*.h", "*.cpp") for path in sorted((ROOT / "engine/src").rglob(kind))]
ENGINE_TESTS = sorted((ROOT / "engine/tests").glob("*.cpp"))
HOOKS = [patch for patch in read_patches() if patch.folder == "hooks"]
A_NAME = re.compile(r"\b(?:ggml|llama|llm|GGML|LLAMA|LLM)_\w+")


@pytest.fixture(scope="module")
def public() -> set[str]:
    """Every word of the public headers; the hook's own is among them, as patches bring it."""
    headers = [*(TREE / "include").glob("*.h"), *(TREE / "ggml/include").glob("*.h")]
    return {word for path in headers for word in re.findall(r"\w+", path.read_text())}


def code(path: Path) -> str:
    """Without comments."""
    return re.sub(r"//.*|/\*.*?\*/", "", path.read_text(), flags=re.MULTILINE)


# ---- the table -----------------------------------------------------------------------------------


def test_all_names_are_where_the_table_says() -> None:
    missing = [f"{found.path}: {found.name}" for found in look_up(TREE, TABLE) if not found.is_found]
    assert missing == []


def test_all_tests_of_the_table_exist() -> None:
    files = {path.stem for folder in ("tests", "engine/tests") for path in (ROOT / folder).rglob("test*.*")}
    assert {test for use in TABLE for test in use.tests} <= files
    assert all(
        use.why and (use.tests or use.path.endswith(("CMakeLists.txt", "speculative.cpp"))) for use in TABLE
    )


@pytest.mark.parametrize("path", [*ENGINE, *ENGINE_TESTS], ids=lambda path: path.name)
def test_headers_that_are_not_public_are_in_the_table(path: Path) -> None:
    listed = {use.path for use in TABLE}
    for header in re.findall(r'^#\s*include "([^"]+)"', path.read_text(), re.MULTILINE):
        if (TREE / "include" / header).exists() or (TREE / "ggml/include" / header).exists():
            continue
        folders = ("src", "ggml/src", "common") if path.parent.name == "common" else ("src", "ggml/src")
        found = [f"{folder}/{header}" for folder in folders if (TREE / folder / header).exists()]
        assert set(found) <= listed, f"{path.name} includes {header}: add it to patches/README.md"


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_names_that_are_not_public_are_in_the_table(path: Path, public: set[str]) -> None:
    text = code(path)
    used = set(A_NAME.findall(text)) - public
    used |= set(re.findall(r"\b(?:common|COMMON)_\w+", text)) if path.parent.name == "common" else set()
    used |= set(re.findall(r"ggml::cpu::(\w+)", text)) | set(re.findall(r"\biface\.(\w+)", text))
    used |= set(re.findall(r'\barch == "([^"]+)"', text))
    assert sorted(used - NAMES) == [], "add them to the table in patches/README.md"


@pytest.mark.parametrize("patch", HOOKS, ids=lambda patch: patch.name)
def test_names_that_a_hook_reads_are_in_the_table(patch: Any, public: set[str]) -> None:
    added = "\n".join(re.findall(r"^\+(?!\+\+ )(.*)", patch.text, re.MULTILINE))
    used = set(A_NAME.findall(re.sub(r"//.*", "", added))) - public
    used |= set(re.findall(r"\b(?:cparams|hparams|prec_policy|slot)(?:\.|->)(\w+)", added))
    used -= {
        "moe_hook",
        "is_to_keep",
        "prompt_parts",
        "prompt_set_parts",
        "record_step",
        "forget_masks",
        "lora_gate_seq",
        "llm_graph_input_lora_gate",
    }  # the hooks' own
    assert sorted(used - NAMES) == [], "add them to the table in patches/README.md"


def test_what_libspac_links_is_public_or_in_the_table(build_dir: Path, public: set[str]) -> None:
    command = ["nm", "-D", "-C", "--undefined-only", str(build_dir / "bin" / "libspac.so")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {
        name.split("(")[0].split("[")[0].rpartition("::")[2].lstrip("~")
        for name in re.findall(r"^\s*U ((?:ggml|llama|llm)\S*)", listed, re.MULTILINE)
    }
    assert len(names) > 50
    assert sorted(names - public - NAMES) == []


def test_a_name_is_a_whole_word() -> None:
    assert has_word('{ LLM_ARCH, "glm5-next" }', "glm5-next")
    assert has_word("x.n_max)", "n_max")
    assert not has_word("n_max_x", "n_max")
    assert not has_word("ffn_moe_topk_x", "ffn_moe_topk")


# ---- what Python knows of llama.cpp --------------------------------------------------------------


def test_nodes_of_the_table_are_those_of_the_recorder() -> None:
    nodes = {name for name in NAMES if name.startswith("ffn_moe_")}
    source = (ROOT / "engine/src/trace/routing-trace.cpp").read_text()
    lists = re.findall(r"(?:WEIGHTS|LOGITS)\[\] += \{([^}]+)\}", source)
    recorded = {"topk", *re.findall(r'"(\w+)"', " ".join(lists))}
    assert len(lists) == 2
    assert nodes == {f"ffn_moe_{name}" for name in recorded}


def test_experts_are_those_of_cpu_moe() -> None:
    found = re.search(r'LLM_FFN_EXPS_REGEX = "([^"]+)"', (TREE / "common/common.h").read_text())
    assert found is not None
    assert found[1].replace("\\\\", "\\").encode() == EXPERT_TENSORS


# ---- the check -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine() -> Path:
    return pristine_tree(ROOT / "build", read_pin())


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def moved(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another llama.cpp: a hook's lines lie elsewhere, another's have changed, a name and a file are gone."""
    tree = copy_tree(pristine, tmp_path_factory.mktemp("moved") / "llama.cpp")
    replace(
        tree / "src/llama-graph.cpp", '#include "llama-graph.h"\n', '#include "llama-graph.h"\n' + "\n" * 40
    )
    replace(tree / "src/llama-cparams.h", "ggml_backend_sched_eval_callback cb_eval;", "callback_t cb_eval;")
    header = tree / "ggml/src/ggml-cpu/ggml-cpu-impl.h"
    replace(header, "ggml_threadpool_chunk_add", "ggml_threadpool_take")
    (tree / "app/download.cpp").unlink()
    return tree


def test_a_copy_may_be_written_to_and_its_links_may_lead_nowhere(tmp_path: Path) -> None:
    source = tmp_path / "tree" / "src" / "llama.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("text")
    (source.parent / "link").symlink_to("/nowhere")
    source.chmod(0o444)
    source.parent.chmod(0o555)
    try:
        copy = copy_tree(tmp_path / "tree", tmp_path / "copy") / "src"
    finally:
        source.parent.chmod(0o755)
    assert [path.stat().st_mode & 0o200 for path in (copy, copy / "llama.cpp")] == [0o200, 0o200]
    assert (copy / "link").is_symlink()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--no-compile", "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_our_own_pin_fits(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(capsys, str(pristine))
    assert (code, report["ok"]) == (0, True)
    assert [patch["patch"] for patch in report["patches"]] == [patch.name for patch in read_patches()]
    assert not any(patch["n_moved"] or patch["rejects"] for patch in report["patches"])


def test_what_moved_is_named(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(capsys, str(moved))
    assert (code, report["ok"]) == (1, False)
    rejects = {(reject["path"], reject["hunk"]) for patch in report["patches"] for reject in patch["rejects"]}
    assert rejects == {("src/llama-cparams.h", 2)}
    missing = {(name["path"], name["name"]) for name in report["names"] if not name["is_found"]}
    assert missing == {
        ("ggml/src/ggml-cpu/ggml-cpu-impl.h", "ggml_threadpool_chunk_add"),
        ("app/download.cpp", ""),
        ("app/download.cpp", "llama_download"),
    }


def test_the_report_names_file_hunk_and_tests(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(moved), "--no-compile"]) == 1
    text = capsys.readouterr().out
    assert f"patches: {len(read_patches()) - 1} of {len(read_patches())} apply" in text
    assert "src/llama-cparams.h, hunk 2: @@" in text
    assert "ggml-cpu-impl.h has no ggml_threadpool_chunk_add (tests: test-dense-matmul)" in text
    assert text.count("app/download.cpp") == 1
    assert text.splitlines()[-1].startswith("does not fit: ")


def test_a_hunk_at_other_lines_still_applies(moved: Path, tmp_path: Path) -> None:
    hook = next(patch for patch in HOOKS if "src/llama-graph.cpp" in patch.paths)
    scratch = tmp_path / "llama.cpp"
    for path in hook.paths:
        if (moved / path).is_file():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(moved / path, scratch / path)
    applied = apply_patch(scratch, hook)
    assert "llama_moe_hook_params" in (scratch / "src/llama-graph.cpp").read_text()
    assert [(reject.path, reject.hunk) for reject in applied.rejects] == [("src/llama-cparams.h", 2)]
    assert not list(scratch.rglob("*.rej"))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    hook = next(patch for patch in HOOKS if "src/llama-graph.cpp" in patch.paths)
    (tmp_path / "empty").mkdir()
    rejects = apply_patches(tmp_path / "empty", [hook])[0].rejects
    assert {reject.path for reject in rejects} == {*hook.paths} - {"include/llama-moe-hook.h"}
    assert all(reject.hunk == 0 and "No such file" in reject.text for reject in rejects)


def test_a_renamed_name_no_longer_compiles(moved: Path, build_dir: Path) -> None:
    """The source that calls it (another one forwards to it by its name); another one still does."""
    commands = read_commands(build_dir, moved, [])
    calls = "ggml_threadpool_chunk_add(params"
    uses = next(c for c in commands if calls in code(ROOT / c.source))
    error = compile_one(uses, moved).error
    assert error is not None
    assert "ggml_threadpool_chunk_add" in error
    other = next(c for c in commands if c.source == "engine/src/draft/hidden-states.cpp")
    assert compile_one(other, moved).error is None


def test_every_source_that_knows_llama_cpp_is_compiled(build_dir: Path, tmp_path: Path) -> None:
    patched = [path for patch in read_patches() for path in patch.paths]
    sources = {command.source for command in read_commands(build_dir, tmp_path, patched)}
    ours = {str(path.relative_to(ROOT)) for path in ENGINE if path.suffix == ".cpp" and includes_llama(path)}
    theirs = {path for path in patched if path.endswith((".c", ".cpp"))}
    sources |= {path for path in theirs if path.startswith("ggml/src/ggml-vulkan/")}  # only with Vulkan
    assert sources == ours | theirs


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_what_is_no_tree_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name)]) == 2
    assert "is no llama.cpp tree" in capsys.readouterr().err


def test_without_a_build_it_says_what_to_do(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(pristine), "--build", str(tmp_path)]) == 2
    assert "make build" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_any_work(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(pristine), "--no-compile", "--json", str(tmp_path / "no" / "report")]) == 2
    assert "no folder that exists" in capsys.readouterr().err
