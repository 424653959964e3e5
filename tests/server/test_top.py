"""`pyspac top`: what an observation holds, how it is drawn, and the command on a running server."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import Serve, complete, run_pyspac
from textual.containers import VerticalScroll
from textual.widgets import Static

from pyspac.engine.board import BoardGeometry, LayerMode, LocalBoard, Residency
from pyspac.engine.step import StepRecord
from pyspac.server.figures import figures
from pyspac.server.heat_map import HeatMap, colour_codes, legend
from pyspac.server.live_view import Chart, LiveView
from pyspac.server.snapshot import BoardWatch, Observation
from pyspac.units import MIB


def board(n_layer: int = 3, n_expert: int = 4) -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=n_layer, n_expert=n_expert, n_expert_used=2, n_slots=5))


class Clock:
    """Each look comes two seconds after the one before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


def test_an_observation_by_hand() -> None:
    """Two steps of 3 drafts, 2 and 0 accepted: 4 tokens in 2 s; 30 of 40 activations on the device."""
    local = board()
    local.counters["n_hit_rows"] = 1000  # before the watch
    watch = BoardWatch(local, Clock())
    local.record_step(StepRecord(n_draft=3, n_accepted=2, draft_us=1000, verify_us=3000))
    local.record_step(StepRecord(n_draft=3, n_accepted=0, draft_us=2000, verify_us=5000))
    for name, n in (("n_hit_rows", 30), ("n_miss_rows", 8), ("n_late_rows", 2), ("n_loads", 6)):
        local.counters[name] += n
    local.residency[0, :3] = Residency.RESIDENT
    local.n_draft_max[:2] = 2  # the second server slot is not in use
    seen = watch.look()
    assert seen.tokens_per_s == 2.0
    assert seen.covered == 0.75
    assert seen.draft_length == 3.0
    assert seen.acceptance_rate == pytest.approx(1 / 3)
    assert seen.loads_per_s == 3.0
    assert (seen.draft_us, seen.verify_us) == (1500, 4000)
    assert (seen.n_resident, seen.n_slots) == (3, 5)
    assert seen.n_draft_max == {0: 2}
    assert seen.byte_budget is None
    assert figures(seen)["draft length"] == "3.00 (at most 2)"
    json.dumps(seen.to_dict())


def test_experts_on_disk_by_hand() -> None:
    """In 2 s 60 of 80 experts were in memory; 40 MiB came in 20 reads, four at a time, waited for 0.5 s."""
    local = board()
    assert observe(local).tier is None
    assert "reads/s" not in figures(observe(local))
    for name, n in (("n_slots", 9), ("n_resident", 8), ("n_hit", 1000), ("n_reads", 500)):
        local.tier[name] = n  # before the watch
    watch = BoardWatch(local, Clock())
    for name, n in (
        ("n_hit", 60), ("n_miss", 20), ("n_reads", 20), ("read_bytes", 40 * MIB), ("read_us", 4_000_000),
        ("busy_us", 1_000_000), ("wait_us", 500_000),
    ):  # fmt: skip
        local.tier[name] += n
    seen = watch.look()
    assert seen.tier is not None
    assert (seen.tier["hit_share"], seen.tier["depth"], seen.tier["n_reads"]) == (0.75, 4.0, 20)
    texts = figures(seen)
    assert texts["in memory"] == "8 of 9 slots"
    assert texts["found there"] == "75.0 %"
    assert texts["reads/s"] == "10.0 (20.0 MiB/s, depth 4.0)"
    assert texts["waited for reads"] == "25 % of the time"
    json.dumps(seen.to_dict())
    assert watch.look().tier == seen.tier | dict.fromkeys(
        ("n_hit", "n_miss", "n_reads", "read_bytes", "read_us", "busy_us", "wait_us"), 0
    ) | dict.fromkeys(("hit_share", "depth"))


def test_whole_layers() -> None:
    local = board()
    assert observe(local).to_dict()["n_whole"] == 0
    assert "whole layers" not in figures(observe(local))
    local.whole[:] = [LayerMode.WHOLE, LayerMode.FILLING, LayerMode.SPLIT]
    assert figures(observe(local))["whole layers"] == "1 of 3"
    assert [layer["mode"] for layer in observe(local).to_dict()["layers"]] == ["whole", "filling", "split"]


def test_whether_copies_pay() -> None:
    local = board()
    assert observe(local).copies is None
    assert "copies" not in figures(observe(local))
    local.fallback[:] = 2, 41
    assert observe(local).to_dict()["copies"] == {"chosen": "frozen", "gain": 0.041}
    assert figures(observe(local))["copies"] == "left out: steps without them are 4.1% faster"
    local.fallback[:] = 1, -3
    assert figures(observe(local))["copies"] == "go on: steps with them are 0.3% slower"
    local.fallback[:] = 9, 9  # of somebody else
    assert observe(local).copies is None


def test_without_a_device_none_of_its_figures() -> None:
    geometry = BoardGeometry.uniform(n_layer=3, n_expert=4, n_expert_used=2, n_slots=0)
    local = LocalBoard(geometry)
    local.tier["n_slots"] = 9
    texts = figures(observe(local))
    assert not {"covered", "loads/s", "copied", "on the device"} & set(texts)
    assert {"tokens/s", "draft length", "in memory"} <= set(texts)
    view = LiveView("x", BoardWatch(local), is_there=lambda: True, period_s=3600)

    async def play() -> None:
        async with view.run_test() as pilot:
            view.refresh_view()
            await pilot.pause()
            assert [chart.title for chart in view.query(Chart)] == ["tokens/s"]

    asyncio.run(play())


def test_nothing_happened() -> None:
    seen = BoardWatch(board(), Clock()).look()
    assert (seen.tokens_per_s, seen.covered, seen.draft_length, seen.acceptance_rate) == (None,) * 4
    assert figures(seen)["tokens/s"] == "-"


def test_colours_tell_what_neither_device_nor_memory_holds() -> None:
    local = board()
    local.residency[0, :2] = Residency.RESIDENT
    local.in_memory[0, 1:3] = 1  # expert 1 is in both, 3 in none
    untiered = colour_codes(observe(local))
    assert untiered[0, 2] == untiered[0, 3]
    local.tier["n_slots"] = 9
    seen = observe(local)
    codes = colour_codes(seen)
    assert codes[0, 0] == codes[0, 1] == untiered[0, 0]
    assert codes[0, 2] == untiered[0, 2]
    assert codes[0, 3] not in untiered
    assert "2+2" in HeatMap().draw(seen, 80, 40).plain.splitlines()[0]
    assert seen.to_dict()["layers"][0]["in_memory"] == [0, 1, 1, 0]
    assert "on disk" in legend(has_tier=True).plain
    assert "on disk" not in legend().plain


def observe(local: LocalBoard) -> Observation:
    return BoardWatch(local, Clock()).look()


def test_colours_tell_residency_and_utility() -> None:
    local = board()
    local.utility[:] = [0, 1, 2, 4]
    local.residency[0] = Residency.RESIDENT
    local.expert_bytes[2] = 0  # not split
    codes = colour_codes(observe(local))
    assert len(set(codes[0].tolist())) == 4
    assert set(codes[0].tolist()).isdisjoint(codes[1].tolist())
    assert set(codes[2].tolist()).isdisjoint([*codes[0].tolist(), *codes[1].tolist()])


@pytest.mark.parametrize(("height", "n_lines"), [(20, 9), (5, 5)])
def test_two_layers_share_a_row_where_space_is_short(height: int, n_lines: int) -> None:
    text = HeatMap().draw(observe(board(n_layer=9, n_expert=40)), 120, height)
    lines = text.plain.split("\n")
    assert len(lines) == n_lines
    assert all("tau" in line for line in lines)


def test_cells_widen_where_there_is_space() -> None:
    seen = observe(board(n_layer=1, n_expert=8))
    assert len(HeatMap().draw(seen, 200, 10).plain) == len(HeatMap().draw(seen, 30, 10).plain) + 2 * 8
    assert "on the device" in legend().plain


def test_the_live_view_shows_what_happens() -> None:
    local = board(n_layer=61, n_expert=384)  # the largest geometry that is expected
    view = LiveView("the headline", BoardWatch(local), is_there=lambda: True, period_s=3600)

    async def play() -> None:
        async with view.run_test(size=(160, 50)) as pilot:
            local.record_step(StepRecord(n_draft=2, n_accepted=1))
            view.refresh_view()
            await pilot.pause()
            assert len(view.query(Chart)) == 3
            assert "tau" in str(view.query_one("#map", Static).content)
            assert view.query_one(VerticalScroll).size.height > 20
            assert "the&#160;headline" in view.export_screenshot()
            await pilot.press("q")

    asyncio.run(play())


def test_the_live_view_ends_with_the_server() -> None:
    view = LiveView("x", BoardWatch(board()), is_there=lambda: False)

    async def play() -> None:
        async with view.run_test() as pilot:
            view.refresh_view()
            await pilot.pause()

    asyncio.run(play())
    assert view.return_code == 1


# ---- on a running server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("top")) as serve:
        yield serve.wait_ready()


def test_once_as_json(served: Serve, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, served.port, 450)
        done = run_pyspac("top", served.board, "--once", "--json", "--seconds", "0.3", cache_dir=tmp_path)
        answer.result()
    assert done.returncode == 0
    seen = json.loads(done.stdout)
    assert seen["board"] == served.board
    assert seen["n_slots"] >= seen["n_resident"] >= 0
    utility = np.array([layer["utility"] for layer in seen["layers"]])
    assert utility.shape == (len(seen["layers"]), len(seen["layers"][0]["residency"]))


def test_once_as_text(served: Serve, tmp_path: Path) -> None:
    done = run_pyspac("top", served.board, "--once", "--seconds", "0.1", cache_dir=tmp_path)
    assert done.returncode == 0
    for word in ("tokens/s", "covered", "draft length", "loads/s"):
        assert word in done.stdout


def test_no_terminal(served: Serve, tmp_path: Path) -> None:
    done = run_pyspac("top", served.board, cache_dir=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "\x1b" not in done.stderr
    assert "the live view needs a terminal: give --once, or --svg FILE" in done.stderr


def test_a_picture(served: Serve, tmp_path: Path) -> None:
    path = tmp_path / "top.svg"
    done = run_pyspac("top", served.board, "--svg", str(path), "--seconds", "0.5", cache_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ET.parse(path).getroot().tag.endswith("svg")
    assert served.board in path.read_text()
    assert "woff" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nobody-has-this"], 1, "no running server has the board"),
        (["--json"], 2, "--once"),
        (["--once", "--seconds", "0"], 2, "--seconds"),
        (["--svg", "/no/such/folder/x.svg"], 2, "--svg"),
        (["a/b"], 2, "board name"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    done = run_pyspac("top", *arguments, cache_dir=tmp_path)
    assert done.returncode == code
    assert text in done.stderr
