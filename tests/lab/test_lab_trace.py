"""Trace files: the CSV reader, Parquet there and back, and what is said about bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import make_trace

from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace, TraceError
from pyspac.lab.trace_file import read_trace, write_trace

CSV = """# route_trace v1
# model=tiny.gguf arch=qwen3moe n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=10
# layer=1 expert_bytes=200 dense_bytes=20
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.75,0,100
0,0,0,0,1,1,0.25,0,100
0,1,1,0,0,2,0.5,1,0
0,1,1,0,1,0,0.5,1,0
0,1,1,1,0,1,0.9,1,0
0,1,1,1,1,3,0.1,1,0
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return path


def test_csv(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, CSV))
    assert trace.geometry.expert_bytes == (100, 200)
    assert trace.geometry.group == (0, 1)
    assert trace.geometry.total_bytes == 1200
    assert trace.status.tolist() == [TokenStatus.PROMPT, TokenStatus.SAMPLED]
    assert trace.experts[0].tolist() == [
        [3, 1],
        [NOT_RUN, NOT_RUN],
    ]  # the last layer ran for the last token only
    assert trace.experts[1].tolist() == [[2, 0], [1, 3]]
    assert trace.weights[1, 1].tolist() == pytest.approx([0.9, 0.1])


def assert_equal(a: Trace, b: Trace) -> None:
    assert a.geometry == b.geometry
    for name in ("step", "position", "status", "experts", "weights", "logits", "early_logits", "draft_logits",
                 "token_id"):  # fmt: skip
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name


def test_parquet_there_and_back(tmp_path: Path) -> None:
    csv = read_trace(write(tmp_path, CSV))
    write_trace(csv, tmp_path / "t.parquet")
    assert_equal(csv, read_trace(tmp_path / "t.parquet"))


def test_logits_survive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, 8)).astype(np.float16)
    early = np.stack([logits, 2 * logits, 3 * logits])
    early[:, :, 0] = np.nan
    trace = make_trace(
        [[[0], [1]], [[2], [3]], [[4], [5]]], logits=logits, early_logits=early, draft_logits=-logits,
        token_id=np.array([7, 5, 7], np.int32),
    )  # fmt: skip
    write_trace(trace, tmp_path / "t.parquet")
    assert_equal(trace, read_trace(tmp_path / "t.parquet"))


def test_a_file_with_guesses_of_the_next_layer_alone_is_read(tmp_path: Path) -> None:
    early = np.zeros((1, 3, 2, 8), np.float16)
    trace = make_trace([[[0], [1]], [[2], [3]], [[4], [5]]], early_logits=early)
    write_trace(trace, tmp_path / "t.parquet")
    found = read_trace(tmp_path / "t.parquet").early_logits
    assert found is not None
    assert found.shape == early.shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "neither"),
        ("# route_trace v1\nturn,phase\n", "columns"),
        (CSV.replace("n_layer=2 ", ""), "n_layer"),
        (CSV + "0,1,2,0,0,1\n", "cut off"),
        (CSV.replace("0,1,1,1,1,3,0.1,1,0", "0,1,1,7,1,3,0.1,1,0"), "outside"),
        (CSV.replace("0,1,1,1,1,3,0.1,1,0", "0,1,1,1,1,9,0.1,1,0"), "outside"),
        (CSV.split("0,0,0,0,0,3")[0], "no rows"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as error:
        read_trace(write(tmp_path, text))
    assert error.value.exit_code == 2


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such"):
        read_trace(tmp_path / "missing")
    good = tmp_path / "good.parquet"
    write_trace(make_trace([[[0]]]), good)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:200])
    with pytest.raises(TraceError, match="cut off"):
        read_trace(cut)


def test_foreign_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "f.parquet")
    with pytest.raises(TraceError, match="not a trace"):
        read_trace(tmp_path / "f.parquet")


def test_inconsistent_traces_are_refused() -> None:
    with pytest.raises(TraceError, match="rise"):
        make_trace([[[0]], [[1]]], step=np.array([1, 0], np.int32))
    with pytest.raises(TraceError, match="outside"):
        make_trace([[[9]]], n_expert=4)
