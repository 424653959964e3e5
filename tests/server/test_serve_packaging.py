"""packaging/: the dashboard's queries against a real Prometheus, and the systemd unit.

Prometheus and systemd-analyze are programs of the system (Debian: prometheus, systemd). Where they are not
installed those checks are skipped, and only names are compared.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import HOST, ROOT, Serve, complete, free_port, wait_for

PACKAGING = ROOT / "packaging"
# filled in only while the thing they show happens
MAY_BE_EMPTY = ("pyspac_draft_limit", "pyspac_byte_budget")


def queries() -> dict[str, str]:
    """Every query of the dashboard, by "panel: legend", with Grafana's variables filled in."""
    dashboard = json.loads((PACKAGING / "grafana-dashboard.json").read_text())
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", "15s")
        .replace("$server", ".*")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("packaging")
    with Serve(folder, "--metrics-port", str(free_port())) as serve:
        yield serve.wait_ready()


def metrics_port(serve: Serve) -> int:
    event = serve.event("metrics")
    assert event is not None
    return int(event["port"])


def test_the_dashboard_asks_for_metrics_that_exist(served: Serve) -> None:
    complete(served.port, 16)
    shown = ""
    for port in (served.port, metrics_port(served)):
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
            shown += response.read().decode()
    known = set(re.findall(r"^# TYPE (\S+) ", shown, re.MULTILINE))
    asked = {name for query in queries().values() for name in re.findall(r"(?:pyspac_|llamacpp:)\w+", query)}
    assert asked - known == set()
    assert len(asked) > 20


@contextmanager
def prometheus(folder: Path, targets: list[int]) -> Iterator[int]:
    """A Prometheus that scrapes these ports of 127.0.0.1 every half second; yields its port."""
    port = free_port()
    config = folder / "prometheus.yml"
    jobs = [
        {
            "job_name": f"job{target}",
            "static_configs": [{"targets": [f"{HOST}:{target}"], "labels": {"server": "t"}}],
        }
        for target in targets
    ]
    config.write_text(
        json.dumps({"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs})
    )  # JSON is YAML
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    argv.append(f"--web.listen-address={HOST}:{port}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for("Prometheus", lambda: is_up(port))
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/-/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def ask(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://{HOST}:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        answer = json.load(response)
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus installed")
def test_every_query_has_an_answer_in_prometheus(served: Serve, tmp_path: Path) -> None:
    with prometheus(tmp_path, [served.port, metrics_port(served)]) as port:
        end_s = time.monotonic() + 6
        while time.monotonic() < end_s:
            complete(served.port, 64)
        answers = {name: ask(port, query) for name, query in queries().items()}
        assert len(ask(port, "pyspac_slots")) == 1
    empty = {name for name, answer in answers.items() if not answer}
    assert {name for name in empty if not any(word in queries()[name] for word in MAY_BE_EMPTY)} == set()
    not_numbers = {name for name, answer in answers.items() for row in answer if row["value"][1] == "NaN"}
    assert not_numbers == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool installed")
@pytest.mark.parametrize("name", ["prometheus.yml", "replicas/prometheus.yml"])
def test_the_examples_of_a_scrape_configuration(name: str) -> None:
    argv = ["promtool", "check", "config", str(PACKAGING / name)]
    assert subprocess.run(argv, capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy installed")
def test_the_routers_configuration() -> None:
    argv = ["haproxy", "-c", "-dW", "-f", str(PACKAGING / "replicas" / "haproxy.cfg")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_files_for_replicas_agree_on_ports() -> None:
    """What the router asks is what Prometheus scrapes, under the same names."""
    folder = PACKAGING / "replicas"
    config = (folder / "haproxy.cfg").read_text()
    scraped = (folder / "prometheus.yml").read_text()
    replicas = re.findall(r"^ +server (\S+) (\S+)", config, re.MULTILINE)
    assert len(replicas) == 2
    for name, address in replicas:
        assert re.search(rf'"{address}"]\n +labels:\n +server: {name}\n', scraped)
    status = re.search(r"frontend status\n +bind (\S+)", config)
    assert status is not None
    assert f'job_name: haproxy\n    static_configs:\n      - targets: ["{status[1]}"]' in scraped
    assert f"http://{status[1]}/stats" in (folder / "rolling-restart.sh").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze installed")
def test_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pyspac@model.service"
    shutil.copy(PACKAGING / "pyspac@.service", unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_the_unit_finds_an_environment_of_its_own(tmp_path: Path) -> None:
    """What it starts is looked for as systemd would: only its PATH, of which /opt is ours here."""
    unit = (PACKAGING / "pyspac@.service").read_text()
    path = re.search(r"^Environment=PATH=(\S+)$", unit, re.MULTILINE)
    start = re.search(r"^ExecStart=(\S+) (\S+) serve", unit, re.MULTILINE)
    assert path is not None
    assert start is not None
    program = tmp_path / "opt" / "pyspac" / "bin" / start[2]
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho here\n")
    program.chmod(0o755)
    names = {"PATH": path[1].replace("/opt/", f"{tmp_path}/opt/")}
    done = subprocess.run(
        [start[1], start[2], "serve"], env=names, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "here\n"


IMAGES = [PACKAGING / "Dockerfile.cpu", PACKAGING / "Dockerfile.cuda"]
DOCKER_STOP_S = 10.0  # until docker kills


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.suffix)
def test_an_image_ends_before_docker_kills_it(image: Path) -> None:
    drain = re.search(r"^ENV PYSPAC_DRAIN=(\d+)$", image.read_text(), re.MULTILINE)
    assert drain is not None
    assert float(drain[1]) <= DOCKER_STOP_S / 2


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.suffix)
def test_an_image_keeps_models(image: Path) -> None:
    """What -hf fetches and what schedulers learn outlive the container."""
    text = image.read_text()
    volumes = re.search(r"^VOLUME (.+)$", text, re.MULTILINE)
    assert volumes is not None
    for variable in ("LLAMA_CACHE", "PYSPAC_CACHE_DIR"):
        folder = re.search(rf"\b{variable}=(\S+)", text)
        assert folder is not None
        assert folder[1] in json.loads(volumes[1])


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.suffix)
def test_an_image_knows_how_a_server_is(served: Serve, image: Path) -> None:
    check = re.search(r"^HEALTHCHECK .*\\\n +CMD (.+)$", image.read_text(), re.MULTILINE)
    assert check is not None
    for port, code in ((served.port, 0), (free_port(), 1)):
        argv = json.loads(check[1].replace(":8080/", f":{port}/"))
        assert argv[0] == "python"
        assert subprocess.run([sys.executable, *argv[1:]], capture_output=True, timeout=30).returncode == code
