"""Comparisons of runs: intervals and p-values against tables and against SciPy, and the report."""

import json

import pytest
from scipy import stats

from transformer import compare
from transformer.spec import SpecError


def run(folder, name, seed, accuracy, **options):
    place = folder / name
    place.mkdir()
    config = {"train": {"seed": seed}, "eval": {"split": "validation"}, "model": {"depth": 1}}
    config["model"] |= options
    done = {"exit_reason": "done", "validation": {"accuracy": accuracy, "tokens": 9, "loss": None}}
    (place / "config.json").write_text(json.dumps(config))
    (place / "result.json").write_text(json.dumps(done))
    return str(place)


def test_the_interval_is_students():
    # t(0.975, 2) = 4.3027; the standard deviation of 1, 2, 3 is 1.
    found = compare.estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.half == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert compare.estimate([2.0]).half is None


def test_a_difference_is_tested_as_scipy_does():
    a, b = [0.71, 0.72, 0.70], [0.65, 0.64, 0.66]
    found = compare.estimate([x - y for x, y in zip(a, b, strict=True)], difference=True)
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.mean + (found.half or 0) == pytest.approx(interval.high)


def test_equal_differences():
    assert compare.estimate([0.0, 0.0], difference=True).p == 1
    assert compare.estimate([0.1, 0.1], difference=True).p == 0


def test_the_report(tmp_path):
    made = [run(tmp_path, f"a{i}", i, 0.7 + i / 100) for i in range(3)]
    made += [run(tmp_path, f"b{i}", i, 0.6 + i / 100, depth=2) for i in range(3)]
    text = compare.sheet(made)
    assert "A  model.depth=1\n   seeds 0, 1, 2\n   accuracy: 0.7100 ± 0.0248" in text
    assert "A - B, paired by seed, 3 seeds\n   accuracy: 0.1000 ± 0.0000" in text
    assert "loss" not in text


def test_refusals(tmp_path):
    a, twice = run(tmp_path, "a", 0, 0.5), run(tmp_path, "b", 0, 0.5)
    with pytest.raises(SpecError, match="are the same run, with the same seed"):
        compare.sheet([a, twice])
    with pytest.raises(SpecError, match="--metrics=bleu: not every run has it"):
        compare.sheet([a], ["bleu"])
    with pytest.raises(SpecError, match="is no working directory"):
        compare.sheet([str(tmp_path / "c")])
    (tmp_path / "a" / "result.json").write_text('{"exit_reason": "signal"}')
    with pytest.raises(SpecError, match="has not finished"):
        compare.sheet([a])
