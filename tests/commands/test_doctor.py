"""pyspac doctor: what it finds here, and what it says where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import HOST, run_pyspac
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands import doctor_checks as doctor
from pyspac.commands.demo import TARGET
from pyspac.commands.doctor_checks import Finding
from pyspac.engine.engine import kernels_name
from pyspac.errors import PyspacError
from pyspac.model import disk_probe
from pyspac.server.build_extras import BuildExtras
from tools.rpc_servers import rpc_server

WHATS = ("RPC server", "device", "link")


def test_on_this_machine() -> None:
    result = CliRunner().invoke(app, ["doctor", "-t", "1", "--json", "-"])
    report = json.loads(result.stdout)
    assert result.exit_code == int(not report["ok"])
    found = {finding["what"]: finding for finding in report["findings"]}
    assert found["engine"]["level"] == "ok"
    name = kernels_name()
    assert found["kernels"]["detail"].startswith(f"{name}: " if name else "none of")
    assert "GB/s read, 1 threads" in found["host memory"]["detail"]
    assert "at depth 32" in found["disk"]["detail"]
    assert "demo-moe.gguf" in found["disk"]["detail"]
    assert all(finding["mend"] for finding in report["findings"] if finding["level"] != "ok")


def test_without_a_gpu_the_fast_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspac.engine.devices.gpu_devices", list)
    (finding,) = doctor._devices()
    assert finding.level == "note"
    assert "--device none" in finding.detail


def test_a_file_system_without_direct_reads_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_O_DIRECT", 0)
    speed, note = doctor._disk(TARGET)
    assert "through the page cache" in speed.detail
    assert note.level == "note"
    assert "ext4" in note.mend


def test_a_model_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "no-such-model.gguf"])
    assert result.exit_code == 2
    assert "no-such-model.gguf: there is no such file" in result.stderr


def test_no_threads_are_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "-t", "0"])
    assert result.exit_code == 2
    assert "-t cannot be 0: give a whole number of 1 or more" in result.stderr


def test_text_shows_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("ok", "a", "fine"), Finding("problem", "b", "is broken", "mend it so")]
    monkeypatch.setattr("pyspac.commands.doctor.examine", lambda n_threads, model, rpc: findings)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "is broken" in result.stdout
    assert "-> mend it so" in result.stdout


def test_a_failing_check_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise PyspacError("no built engine: run make build")

    monkeypatch.setattr(doctor, "_engine", broken)
    findings = doctor.examine(1, TARGET)
    assert doctor.has_problem(findings)
    assert "run make build" in next(f.detail for f in findings if f.level == "problem")
    assert any(finding.what == "host" for finding in findings)


def test_other_bindings_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "0.2.1")
    (finding,) = doctor._bindings()
    assert finding.level == "problem"
    assert "pip install" in finding.mend


def test_what_llama_server_lacks_is_said_with_the_way_to_mend_it() -> None:
    assert [finding.level for finding in doctor._server(BuildExtras(https=True, ui=True))] == ["ok", "ok"]
    downloads, page = doctor._server(BuildExtras(https=False, ui=False))
    assert (downloads.level, page.level) == ("note", "note")
    assert "libssl-dev" in downloads.mend
    assert "PYSPAC_UI=1 make build" in page.mend


def test_rpc_servers(tmp_path: Path) -> None:
    """In a process of its own, as ggml keeps the servers' devices for good."""
    nobody = f"{HOST}:1"
    with rpc_server() as port:
        good = f"{HOST}:{port}"
        done = run_pyspac(
            "doctor", "-t", "1", "--rpc", f"{good}, {nobody}", "--json", "-", cache_dir=tmp_path
        )
    report = json.loads(done.stdout)
    assert done.returncode == 1
    found = {text: [f["detail"] for f in report["findings"] if f["what"] == text] for text in WHATS}
    answer, failure = found["RPC server"]
    assert answer.startswith(f"{good}: protocol 7.0.1, answers after ")
    assert nobody in failure
    assert "connecting failed" in failure
    assert any(text.startswith(f"RPC0: {good}, ") and "GiB free" in text for text in found["device"])
    assert any(text.endswith("GB/s to RPC0, from ordinary memory") for text in found["link"])


@pytest.mark.parametrize(
    ("rpc", "why"),
    [
        ("host", "give HOST:PORT"),
        ("127.0.0.1:1,host:x", "give HOST:PORT"),
        ("", "--rpc cannot be '': give HOST:PORT"),
        ("[::1]:5", "IPv4"),
        ("127.0.0.1:5,127.0.0.1:5", "names 127.0.0.1:5 twice: name each server once"),
    ],
)
def test_what_is_no_server(rpc: str, why: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--rpc", rpc])
    assert result.exit_code == 2
    assert why in result.stderr
