"""The float that this CPU multiplies faster is measured once, and remembered."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from toolkit.targets import cpu_dtype


def pretend(monkeypatch: pytest.MonkeyPatch, speedup: float) -> list[float]:
    """A CPU with float32 products so much faster; the list counts measurements."""
    taken: list[float] = []

    def measure() -> dict[str, float]:
        taken.append(speedup)
        return {"float32_speedup": speedup}

    monkeypatch.setattr(cpu_dtype, "_measure", measure)
    forget()  # as a new process has it
    return taken


def forget() -> None:
    cpu_dtype.fastest_cpu_dtype.cache_clear()


@pytest.fixture(autouse=True)
def pretend_no_longer():
    """No pretended CPU outlives its test."""
    yield
    forget()


@pytest.mark.parametrize("speedup, expected", [(1.6, torch.float32), (0.3, torch.bfloat16), (1.0, torch.bfloat16)])
def test_the_faster_one_is_taken_and_remembered(monkeypatch, own_cache, caplog, speedup, expected):
    """A second process must not measure again and come to another answer: stages would not fit each other. What is kept
    from now on is said, and where."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level(logging.INFO, logger="toolkit")
    first = pretend(monkeypatch, speedup)
    assert cpu_dtype.fastest_cpu_dtype() == expected and len(first) == 1
    assert f"{speedup:.2f} times" in caplog.text and f"cached in {own_cache / 'cpu_products.json'}" in caplog.text
    caplog.clear()
    other = pretend(monkeypatch, 1 / speedup if speedup != 1 else 2.0)
    assert cpu_dtype.fastest_cpu_dtype() == expected and not other
    assert "cached in" not in caplog.text
    assert len(json.loads((own_cache / "cpu_products.json").read_text())) == 1


def test_a_cache_that_cannot_be_kept_still_gives_an_answer(monkeypatch, own_cache):
    """A damaged or unwritable file costs a measurement, not the run."""
    own_cache.mkdir()
    (own_cache / "cpu_products.json").write_text("{")
    pretend(monkeypatch, 2.0)
    assert cpu_dtype.fastest_cpu_dtype() == torch.float32
    monkeypatch.setenv("TOOLKIT_CACHE", "/proc/nowhere")
    forget()
    assert cpu_dtype.fastest_cpu_dtype() == torch.float32


def test_the_measurement_compares_and_leaves_the_threads_alone():
    threads = torch.get_num_threads()
    speedup = cpu_dtype._measure()["float32_speedup"]
    assert 0.01 < speedup < 100 and torch.get_num_threads() == threads
