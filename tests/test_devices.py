"""What a run does to the process that it is in, and gives back."""

from __future__ import annotations

import threading

import pytest
import torch

from dflash.devices import one_host_thread

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")  # names alone: no GPU is asked


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of_a_new_worker() -> int:
    found = []
    worker = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    worker.start()
    worker.join()
    return found[0]


def test_a_run_on_gpus_uses_one_host_thread_in_every_worker(three_threads):
    with one_host_thread([CUDA, torch.device("cuda", 1)]):
        assert torch.get_num_threads() == 1 and threads_of_a_new_worker() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(OSError), one_host_thread([CUDA]):
        raise OSError
    assert torch.get_num_threads() == 3 and threads_of_a_new_worker() == 3


@pytest.mark.parametrize("devices", [[CPU], [CUDA, CPU]])
def test_a_run_that_computes_on_the_cpu_keeps_its_threads(three_threads, devices):
    with one_host_thread(devices):
        assert torch.get_num_threads() == 3
