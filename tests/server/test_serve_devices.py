"""Several RPC servers behind the command line and a server: one text, figures of each, and one that dies."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import gguf_models as models
import pytest
from serving import HOST, TARGET, Serve, complete, environment, free_port, run_pyspac, wait_for

from pyspac.engine.devices import Device
from pyspac.forward.options import CacheSize
from pyspac.server import plan
from pyspac.server.arguments import Launch, server_argv, server_env
from pyspac.server.options import ServeOptions
from tools.rpc_servers import start_rpc_server

PROMPT = "def split(text):"
GREEDY = ("-p", PROMPT, "-n", "24", "--temp", "0", "-t", "1", "--host-kernels", "ggml", "--json", "-")


@contextmanager
def two_servers() -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """Fresh ones, by their addresses."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        yield [(f"{HOST}:{port}", stack.enter_context(start_rpc_server(port))) for port in ports]


@pytest.fixture(scope="module")
def rpc() -> Iterator[str]:
    with two_servers() as servers:
        yield ",".join(address for address, _ in servers)


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_pyspac("run", "-m", str(TARGET), *arguments, cache_dir=tmp_path, timeout_s=120)


def test_two_servers_give_the_text_of_one(rpc: str, tmp_path: Path) -> None:
    runs = [
        run(tmp_path, *GREEDY, "--rpc", servers, "--cache", cache)
        for servers, cache in ((rpc, "25%,50%"), (rpc.split(",")[0], "25%"))
    ]
    both, one = (json.loads(done.stdout) for done in runs)
    assert both["token_ids"] == one["token_ids"]
    assert both["device"] == "RPC0,RPC1"
    first, second = both["devices"]
    assert (first["name"], second["name"]) == ("RPC0", "RPC1")
    assert first["n_layers"] + second["n_layers"] == both["layers"]["split"] == 6
    assert first["n_slots"] / first["n_layers"] == second["n_slots"] / second["n_layers"] / 2
    assert first["n_loads"] + second["n_loads"] == both["experts"]["n_loads"]
    assert min(first["n_device_rows"], second["n_device_rows"]) > 0
    assert not first["is_emulated"]
    assert len(one["devices"]) == 1


def test_the_table_has_a_row_of_each(rpc: str, tmp_path: Path) -> None:
    done = run(
        tmp_path, "-p", PROMPT, "-n", "8", "--rpc", rpc, "--cache", "25%", "--policy", "copy_gb_s=[1,0.5]"
    )
    assert "split between RPC0,RPC1 with an emulated link and the host" in done.stderr
    for name in ("RPC0", "RPC1"):
        assert any(line.startswith(f"{name} ") and "slots" in line for line in done.stderr.splitlines())


def test_layers_as_the_user_deals_them_out(rpc: str, tmp_path: Path) -> None:
    done = run(tmp_path, *GREEDY, "--rpc", rpc, "--device", "RPC1,RPC0", "-ts", "1,6", "--cache", "25%")
    first, second = json.loads(done.stdout)["devices"]
    assert (first["name"], first["n_layers"]) == ("RPC1", 1)
    assert (second["name"], second["n_layers"]) == ("RPC0", 5)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--cache", "1,2,3"], "has 3 sizes, and there are 2 devices"),
        (["--cache", "25%,ten"], "--cache ten is no size"),
        (["--cache", "25%,0"], "more than 0"),
        (["--cache", "25%", "--device", "RPC0,RPC9"], 'there is no device "RPC9" here'),
        (["--cache", "25%", "--device", "RPC0,rpc0"], "names RPC0 twice"),
        (["--cache", "25%", "--device", "RPC0,auto"], "cannot be in a list"),
        (["--cache", "25%", "-ts", "1,2,3"], "--tensor-split 1,2,3 has 3 numbers"),
        (["--cache", "25%", "-ts", "1,x"], "--tensor-split cannot be '1,x': give a share"),
        (["--cache", "25%", "-ts", "0,0"], "--tensor-split cannot be '0,0': give a share"),
        (["--cache", "25%", "-ts", "0,1"], "gives RPC0 no MoE layer of this model"),
        (["--cache", "25%", "--policy", "copy_gb_s=[1,2,3]"], "copy_gb_s 1,2,3 has 3 numbers"),
        (["--cache", "99999999,25%"], "of RPC0's free memory"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], why: str, rpc: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-p", "a", "-n", "2", "--rpc", rpc, *arguments)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert done.stdout == ""


def test_what_auto_stands_for_is_named_to_llama_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to the engine: it leaves out those that have no MoE layer."""
    parts = [
        Device(name=name, description="", handle=1 + i, memory_free=1 << 34, memory_total=1 << 34)
        for i, name in enumerate(("CUDA0", "CUDA1"))
    ]
    both = replace(parts[0], name="CUDA0,CUDA1", parts=tuple(parts))
    monkeypatch.setattr(plan, "probe_device", lambda names, rpc, is_stopped, is_split: both)
    auto, named = (
        plan.plan_launch(ServeOptions(model=TARGET, device=device), lambda: False)
        for device in ("auto", "cuda0,CUDA1")
    )
    for found, in_engine in ((auto, "auto"), (named, "CUDA0,CUDA1")):
        argv = server_argv(found.options, found.launch, Path())
        assert argv[argv.index("--device") + 1] == "CUDA0,CUDA1"
        assert server_env(found.options)["PYSPAC_DEVICE"] == in_engine


def test_servers_are_named_to_llama_server_without_spaces() -> None:
    options = ServeOptions(model=Path("m.gguf"), rpc="a:1, b:2")
    argv = server_argv(options, Launch(port=1, board="b", cache="25%", devices="RPC0,RPC1"), Path())
    assert argv[argv.index("--rpc") + 1] == "a:1,b:2"


@pytest.mark.parametrize("shares", ["1,2,3", "1/2/3"])
@pytest.mark.parametrize(
    ("rpc", "n_devices", "lost", "left"),
    [
        ("a:1, b:2,c:3", (1, 1, 1), "b:2", ("a:1,c:3", "10%,30%", (1, 3))),
        ("a:1,b:2", (2, 1), "b:2", ("a:1", "10%,20%", (1, 2))),
        ("a:1,b:2", (2, 1), "a:1", ("b:2", "30%", (3,))),
        ("a:1,b:2,c:3", (0, 3, 0), "c:3", ("a:1,b:2", "10%,20%,30%", (1, 2, 3))),
    ],
)
def test_what_is_given_for_each_device_goes_with_its_server(
    rpc: str,
    n_devices: tuple[int, ...],
    lost: str,
    left: tuple[object, ...],
    shares: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ServeOptions(
        model=Path("m.gguf"),
        rpc=rpc,
        cache=CacheSize(text="10%,20%,30%"),
        passed=("-np", "1", "-ts", shares),
    )
    monkeypatch.setattr(plan, "servers_that_fail", lambda endpoints: {lost: f"{lost} hangs"})
    found = plan.without_lost(given, n_devices)
    assert (found.rpc, found.cache.text, found.tensor_split) == left
    assert found.passed[:2] == ("-np", "1")
    monkeypatch.setattr(plan, "servers_that_fail", lambda endpoints: dict.fromkeys(endpoints, "hangs"))
    assert plan.without_lost(given, n_devices) == given
    named = replace(given, device="RPC0,RPC1,RPC2")
    assert plan.without_lost(named, n_devices) == named


@pytest.mark.parametrize(
    ("passed", "why"),
    [
        (["-ts", "1,2,3"], "has 3 numbers, and there are 2 devices with layers (RPC0,RPC1)"),
        (["-ts", "1"], "has 1 number, and there are 2 devices"),
        (["--tensor-split", "1,x"], "--tensor-split cannot be '1,x': give a share"),
        (["-ts", "0/0"], "--tensor-split cannot be '0,0': give a share"),
        (["-ts", "1,-1"], "not all 0"),
        (["-ts", "nan,1"], "not all 0"),
        (["-ts", "0,1"], "gives RPC0 no MoE layer of this model"),
        (["-ts", "6/1"], "gives RPC1 no MoE layer of this model"),
        (["-ts", "1,1", "-ngl", "1"], "-ngl 1 puts no MoE layer of this model on a device"),
        (["-ts", "1,1", "-ngl", "0"], "so --tensor-split 1,1 shares out nothing: raise -ngl"),
        (["-ts", "1,1", "-ngl", "2"], "gives RPC1 no MoE layer of this model"),
        (["-ts", "1,1", "--tensor-split", "0,1"], "gives RPC0 no MoE layer of this model"),
        (["-ts", "1_0,10"], "--tensor-split cannot be '1_0,10': give a share"),
        (["-sm", "none"], "-sm none uses one device, and there are 2 (RPC0,RPC1): name one device with"),
        (["-sm", "layer", "--split-mode", "none", "-mg", "1"], "-sm none uses one device"),
    ],
)
def test_serve_refuses_shares_before_anything_starts(
    passed: list[str], why: str, rpc: str, tmp_path: Path
) -> None:
    """Also with --restart, which would try for ever."""
    done = run_pyspac(
        "serve", "-m", str(TARGET), "--rpc", rpc, "--restart", "--", *passed, cache_dir=tmp_path, timeout_s=60
    )
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("TENSOR_SPLIT", "0,1"), ("SPLIT_MODE", "none"), ("HF_REPO", "a/b")]
)
def test_serve_refuses_what_gets_around_the_checks(name: str, value: str, tmp_path: Path) -> None:
    variable = {f"LLAMA_ARG_{name}": value}
    done = run_pyspac("serve", "-m", str(TARGET), cache_dir=tmp_path, timeout_s=60, variables=variable)
    assert done.returncode == 2, done.stderr
    assert f"LLAMA_ARG_{name}={value} in the environment cannot be checked: unset it" in done.stderr
    assert "starting" not in done.stderr


def test_one_server_too_many(rpc: str, tmp_path: Path) -> None:
    """A layer, and the output, which the second server computes: nobody named it, so it is left out."""
    model = models.write_model(tmp_path / "model.gguf", "qwen3moe", n_layer=1)
    done = run_pyspac(
        "run", "-m", str(model), "-p", "a", "-n", "2", "--rpc", rpc, "--cache", "25%,50%", "--json", "-",
        "-v", cache_dir=tmp_path, timeout_s=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == "RPC0"
    assert [row["n_slots"] for row in report["devices"]] == [4]
    assert done.stderr.count("gives RPC1 no MoE layer of this model: it holds no experts") == 1


def test_a_server_named_twice_or_not_there(rpc: str, tmp_path: Path) -> None:
    one = rpc.split(",")[0]
    for servers, why in ((f"{one},{one}", f"names {one} twice"), (f"{one},{HOST}:1", "connecting failed")):
        done = run(tmp_path, "-p", "a", "-n", "2", "--rpc", servers)
        assert done.returncode == 2, done.stderr
        assert why in done.stderr


def test_a_server_that_dies(tmp_path: Path) -> None:
    """It is said, and not with a backtrace."""
    with two_servers() as servers:
        rpc = ",".join(address for address, _ in servers)
        argv = [
            "run",
            "-m",
            str(TARGET),
            "-p",
            PROMPT,
            "-n",
            "900",
            "--ignore-eos",
            "--rpc",
            rpc,
            "--cache",
            "25%",
            "-t",
            "1",
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "pyspac", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)  # the first token
            servers[1][1].kill()
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"as {servers[1][0]} is gone" in stderr.decode()


def test_serve_over_two_servers_and_on_with_one(tmp_path: Path) -> None:
    """Figures of each device; a server that dies takes llama-server with it, which starts without it."""
    with two_servers() as servers:
        rpc, metrics = ",".join(address for address, _ in servers), free_port()
        flags = ("--rpc", rpc, "--cache", "25%,50%", "--restart", "--metrics-port", str(metrics))
        with Serve(tmp_path, *flags, draft=False, device="auto") as serve:
            serve.wait_ready()
            text = complete(serve.port, 24)["content"]
            with urllib.request.urlopen(f"http://{HOST}:{metrics}/metrics", timeout=10) as response:
                lines = response.read().decode().splitlines()
            slots = {line.rsplit(" ", 1)[0] for line in lines if line.startswith("pyspac_device_slots")}
            assert slots == {f'pyspac_device_slots{{device="{name}"}}' for name in ("RPC0", "RPC1")}
            top = run_pyspac("top", serve.board, "--once", "--json", cache_dir=tmp_path)
            devices = json.loads(top.stdout)["devices"]
            assert [device["name"] for device in devices] == ["RPC0", "RPC1"]

            servers[0][1].kill()
            with pytest.raises((OSError, http.client.HTTPException)):
                complete(serve.port, 24)
            wait_for("the loss to be said", lambda: serve.event("rpc_lost"))
            serve.wait_ready(1)
            assert complete(serve.port, 24)["content"] == text
            assert serve.event("rpc_lost")["endpoints"] == servers[0][0]  # type: ignore[index]


def test_serve_goes_on_with_a_server_of_two_devices(tmp_path: Path) -> None:
    """And with as many sizes and shares as it has devices."""
    a, b = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    with (
        start_rpc_server(int(a.rpartition(":")[2]), "-d", "CPU,CPU"),
        start_rpc_server(int(b.rpartition(":")[2])) as of_b,
        Serve(
            tmp_path, "--rpc", f"{a},{b}", "--cache", "10%,20%,30%", "--restart",
            draft=False, device="auto", passed=("-ts", "1,2,3"),
        ) as serve,
    ):  # fmt: skip
        serve.wait_ready()
        text = complete(serve.port, 24)["content"]
        of_b.kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            complete(serve.port, 24)
        serve.wait_ready(1)
        assert complete(serve.port, 24)["content"] == text
        starts = [event["argv"] for event in serve.events if "argv" in event]
    sizes = [argv[argv.index("--spac-cache") + 1] for argv in starts]
    shares = [argv[argv.index("-ts") + 1] for argv in starts]
    assert (sizes[0], shares[0]) == ("10%,20%,30%", "1,2,3")
    assert (sizes[-1], shares[-1]) == ("10%,20%", "1,2")


def test_serve_waits_for_no_other_thing_than_servers(tmp_path: Path) -> None:
    """What is wrong for another reason ends it, as it would have ended the first start."""
    model = tmp_path / "model.gguf"
    model.write_bytes(TARGET.read_bytes())
    with two_servers() as ((first, _), (second, server)):
        flags = ("--rpc", f"{first},{second}", "--cache", "25%", "--restart")
        with Serve(tmp_path, *flags, draft=False, device="auto", pair=(model, model)) as serve:
            serve.wait_ready()
            model.unlink()
            server.kill()
            os.kill(serve.server_pid, signal.SIGKILL)
            assert serve.wait() == 2
            assert serve.event("rpc_missing") is None
            assert f"{model}: there is no such file" in serve.log()


def test_the_drop_in_over_two_servers(rpc: str, tmp_path: Path) -> None:
    """In a process of its own, as ggml keeps the servers' devices for good."""
    program = f"""
import pyspac
lists = {{"rpc": {rpc.split(",")!r}, "cache": ["25%", "50%"]}}
for shares in ([3, 4], "1,6", ["4", "3"]):
    with pyspac.Llama({str(TARGET)!r}, verbose=False, tensor_split=shares, **lists) as llm:
        assert llm({PROMPT!r}, max_tokens=8, temperature=0.0)["choices"][0]["text"]
        print([(device["name"], device["n_layers"]) for device in llm.stats()["devices"]])
wrong = ([1, 2, 3], [0, 0], [0, 1], "1,x", ["1", "y"], [None], [], "", 7, True, [[1, 2]])
for name, value in (("cache", "1,2,3"), *(("tensor_split", v) for v in wrong)):
    try:
        pyspac.Llama({str(TARGET)!r}, rpc={rpc!r}, verbose=False, **{{name: value}})
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for first, second in ((3, 3), (1, 5), (4, 2)):
        assert f"[('RPC0', {first}), ('RPC1', {second})]" in done.stdout
    for said in (
        "cache 1,2,3 has 3 sizes, and there are 2 devices",
        "tensor_split 1,2,3 has 3 numbers, and there are 2 devices",
        "tensor_split cannot be '0,0'",
        "tensor_split 0,1 gives RPC0 no MoE layer",
        "tensor_split cannot be '1,x': give a share of the layers for each device",
        "tensor_split cannot be '1,y'",
        "tensor_split cannot be [None]: give shares of the layers",
        "tensor_split cannot be []",
        "tensor_split cannot be ''",
        "tensor_split 7 has 1 number, and there are 2 devices",
        "tensor_split cannot be True",
        "tensor_split cannot be [[1, 2]]",
    ):
        assert said in done.stdout


@contextmanager
def frozen(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """It takes connections, and answers nobody."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_frozen_server_is_named(tmp_path: Path) -> None:
    with two_servers() as ((first, _), (second, server)), frozen(server):
        done = run(tmp_path, "-p", "a", "-n", "2", "--rpc", f"{first},{second}")
    assert done.returncode == 2, done.stderr
    assert f"the RPC server at {second} does not answer" in done.stderr
    assert first not in done.stderr


def test_serve_goes_on_without_a_frozen_server(tmp_path: Path) -> None:
    """And with its share of the layers: the other one has them all."""
    with two_servers() as ((first, _), (second, server)):
        flags = ("--rpc", f"{first},{second}", "--cache", "25%,50%", "--restart")
        with Serve(tmp_path, *flags, draft=False, device="auto", passed=("-ts", "3/4")) as serve:
            serve.wait_ready()
            text = complete(serve.port, 24)["content"]
            with frozen(server):
                os.kill(serve.server_pid, signal.SIGKILL)
                wait_for("the loss to be said", lambda: serve.event("rpc_lost"), 60)
                serve.wait_ready(1)
                assert complete(serve.port, 24)["content"] == text
            lost = serve.event("rpc_lost")
            assert lost is not None
            assert lost["endpoints"] == second
            assert f"the RPC server at {second} does not answer" in str(lost)


def test_serve_waits_for_a_named_device(tmp_path: Path) -> None:
    """The others' names would change without it; llama-server itself would wait without end."""
    with two_servers() as ((first, _), (second, server)):
        flags = ("--rpc", f"{first},{second}", "--restart")
        with Serve(tmp_path, *flags, draft=False, device="RPC0,RPC1") as serve:
            serve.wait_ready()
            with frozen(server):
                os.kill(serve.server_pid, signal.SIGKILL)
                wait_for("the missing server to be said", lambda: serve.event("rpc_missing"), 60)
                assert serve.event("ready", 1) is None
            serve.wait_ready(1)


def test_a_server_that_never_was_ready_is_not_started_for_ever(tmp_path: Path) -> None:
    """llama-server takes the option, and misses the file when it loads the model."""
    with Serve(tmp_path, "--restart", draft=False, passed=("--lora", "/no/such/file.gguf")) as serve:
        assert serve.wait() == 1
        assert len([event for event in serve.events if event.get("event") == "server_died"]) == 2
        assert "it ended 3 times before it was ready" in serve.log()
