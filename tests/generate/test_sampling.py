"""pyspac.generate.sampling: filters, greedy choice, and that verification keeps the distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pyspac.errors import ConfigError, PyspacError
from pyspac.generate.sampling import Sampler, SamplingParams, argmax, residual

ALL = SamplingParams(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)  # the plain softmax


def logits_of(probs: list[float]) -> np.ndarray:
    return np.log(np.array(probs, np.float64)).astype(np.float32)


def sampler(**changes: float) -> Sampler:
    fields = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1} | changes
    return Sampler(SamplingParams(**fields))  # type: ignore[arg-type]


# ---- filters --------------------------------------------------------------------------------------


def test_filters_by_hand() -> None:
    """Shares 0.5, 0.3, 0.15, 0.05: top-k 3 leaves out 0.05; top-p 0.79 and min-p 0.5 keep 0.5 and 0.3."""
    logits = logits_of([0.15, 0.5, 0.05, 0.3])
    assert sampler().probs(logits) == pytest.approx([0.15, 0.5, 0.05, 0.3])
    assert sampler(top_k=3).probs(logits) == pytest.approx(np.array([0.15, 0.5, 0, 0.3]) / 0.95)
    assert sampler(top_p=0.79).probs(logits) == pytest.approx(np.array([0, 0.5, 0, 0.3]) / 0.8)
    assert sampler(min_p=0.5).probs(logits) == pytest.approx(np.array([0, 0.5, 0, 0.3]) / 0.8)


def test_temperature_comes_after_the_filters() -> None:
    """At temperature 0.5 shares are squared; top-p 0.79 still looks at 0.5 and 0.3."""
    probs = sampler(top_p=0.79, temp=0.5).probs(logits_of([0.15, 0.5, 0.05, 0.3]))
    assert probs == pytest.approx(np.array([0, 0.25, 0, 0.09]) / 0.34)


def test_top_k_takes_the_lowest_id_among_equals() -> None:
    probs = sampler(top_k=2).probs(np.array([1, 3, 3, 3], np.float32))
    assert probs == pytest.approx([0, 0.5, 0.5, 0])


def test_filtered_tokens_are_never_drawn() -> None:
    s = sampler(top_k=2)
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert {s.sample(logits)[0] for _ in range(200)} == {1, 3}


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.01, 5),
)
def test_probs_are_a_distribution(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temp: float
) -> None:
    probs = sampler(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp).probs(logits)
    assert probs.sum() == pytest.approx(1)
    assert probs[argmax(logits)] == probs.max() > 0
    assert top_k == 0 or np.count_nonzero(probs) <= top_k


# ---- greedy ---------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert argmax(np.array([1, 5, 5, 2], np.float32)) == 1


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_nan_is_an_error(temp: float) -> None:
    with pytest.raises(PyspacError, match="instead of logits"):
        sampler(temp=temp).sample(np.array([0, np.nan, 1], np.float32))


def test_greedy_verification() -> None:
    """Best tokens by row: 2, 0, 1. Draft 2, 1: the first holds, the second becomes 0 and ends the step."""
    logits = np.eye(3, dtype=np.float32)[[2, 0, 1]]
    s = sampler(temp=0.0)
    assert s.verify(logits, [2, 1], None).tokens == [2, 0]
    assert s.verify(logits, [2, 0], None).tokens == [2, 0, 1]
    assert s.verify(logits, [0, 0], None).n_accepted == 0
    assert s.verify(logits[:1], [], None).tokens == [2]


# ---- speculation keeps the distribution -----------------------------------------------------------

TARGET = np.array([0.05, 0.4, 0.25, 0.0, 0.3])
DRAFT = np.array([0.3, 0.1, 0.3, 0.2, 0.1])
N_TRIALS = 20_000


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic; impossible outcomes must not occur."""
    assert not counts[probs == 0].any()
    expected = (probs * counts.sum())[probs > 0]
    return float((((counts[probs > 0] - expected) ** 2) / expected).sum())


def test_residual_by_hand() -> None:
    """max(0, p - q) = 0, 0.3, 0, 0, 0.2."""
    assert residual(TARGET, 0, DRAFT) == pytest.approx([0, 0.3, 0, 0, 0.2])
    assert residual(TARGET, 1, None) == pytest.approx([0.05, 0, 0.25, 0, 0.3])


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["drawn from q", "always token 2"])
def test_first_token_has_the_targets_distribution(is_deterministic: bool) -> None:
    """99.99 % quantile of chi-square with 3 degrees of freedom: 21.1."""
    with np.errstate(divide="ignore"):
        logits = np.stack([logits_of(list(TARGET))] * 2)
    s, drafts = Sampler(ALL), Sampler(SamplingParams(temp=1.0, seed=2))
    counts = np.zeros(5)
    n_accepted = 0
    for _ in range(N_TRIALS):
        token = 2 if is_deterministic else drafts.draw(DRAFT)
        verdict = s.verify(logits, [token], None if is_deterministic else [DRAFT])
        counts[verdict.tokens[0]] += 1
        n_accepted += verdict.n_accepted
    assert chi_square(counts, TARGET) < 21.1
    expected_rate = TARGET[2] if is_deterministic else np.minimum(TARGET, DRAFT).sum()
    assert n_accepted / N_TRIALS == pytest.approx(expected_rate, abs=0.02)


def test_pairs_have_the_targets_joint_distribution() -> None:
    """Two drafted tokens of a chain of order one; 99.99 % quantile of chi-square, 8 degrees: 31.8."""
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.ones(3), size=(2, 4))  # [4, 3]: row 0 begins, row 1 + x follows token x
    s, drafts = Sampler(ALL), Sampler(SamplingParams(temp=1.0, seed=3))
    counts = np.zeros((3, 3))
    for _ in range(N_TRIALS):
        x = drafts.draw(q[0])
        y = drafts.draw(q[1 + x])
        logits = np.log(p[[0, 1 + x, 1 + y]]).astype(np.float32)
        tokens = s.verify(logits, [x, y], [q[0], q[1 + x]]).tokens
        if len(tokens) == 1:  # rejected at once: the next step draws the second token
            tokens.append(s.draw(p[1 + tokens[0]]))
        counts[tokens[0], tokens[1]] += 1
    joint = p[0][:, None] * p[1:]
    assert chi_square(counts.ravel(), joint.ravel()) < 31.8


def test_a_seed_repeats_a_run() -> None:
    logits = logits_of([0.2, 0.3, 0.5])
    first, second, other = (Sampler(SamplingParams(temp=1.0, seed=seed)) for seed in (7, 7, 8))
    draws = [[s.sample(logits)[0] for _ in range(50)] for s in (first, second, other)]
    assert draws[0] == draws[1] != draws[2]
    assert Sampler(SamplingParams()).seed >= 0


@pytest.mark.parametrize(
    ("field", "value"), [("temp", -1.0), ("top_k", -1), ("top_p", 1.5), ("min_p", -0.1), ("seed", -2)]
)
def test_settings_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} cannot be {value}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
