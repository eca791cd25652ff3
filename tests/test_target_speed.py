"""A hybrid target without its fast kernels is told once, with the speed measured; the features do not change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_target as build

from dflash.target import speed as target_speed
from dflash.target.speed import preflight


def test_a_dense_target_is_only_measured():
    speed = preflight(build("dense"), 64)
    assert speed.tokens_per_second > 0 and speed.fast_kernels is None and speed.message is None


def test_a_hybrid_target_on_the_reference_path_is_told_with_its_speed():
    """openthai-systemone#2: one log line among hundreds, and a run several times too slow."""
    speed = preflight(build("hybrid"), 64)
    assert speed.fast_kernels is False
    assert "(3 of 4 layers keep a recurrent state)" in speed.message
    assert "without flash-linear-attention" in speed.message
    assert f"{speed.tokens_per_second:,.0f} tokens/s on cpu" in speed.message


def test_with_the_kernels_nothing_is_said(monkeypatch):
    target = build("hybrid")
    monkeypatch.setattr(target_speed, "has_fast_kernels", lambda: True)
    monkeypatch.setattr(type(target), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(type(target), "capture", lambda self, ids: None)
    monkeypatch.setattr(target_speed, "synchronize", lambda device: None)
    speed = preflight(target, 64)
    assert speed.fast_kernels is True and speed.message is None


@pytest.mark.gpu
def test_features_are_the_same_with_and_without_the_fast_kernels(tmp_path):
    """A process that sees no GPU takes the reference path, so it is the oracle."""
    if not torch.cuda.is_available() or not target_speed.has_fast_kernels():
        pytest.skip("needs a CUDA device and flash-linear-attention")
    ids, lengths = torch.randint(1, 60, (1, 200)), torch.tensor([70, 130])
    torch.save((ids, lengths), tmp_path / "row.pt")
    script = (
        "import sys, torch; from tiny_models import tiny_target; row = torch.load(sys.argv[1] + '/row.pt'); "
        "torch.save(tiny_target('hybrid').capture(*row).verifier_last_hidden, sys.argv[1] + '/wanted.pt')"
    )
    unseen = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([*sys.path, os.path.dirname(__file__)])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=unseen, check=True)
    target = build("hybrid")
    target.model.to("cuda")
    got = target.capture(ids, lengths).to("cpu")
    torch.testing.assert_close(got.verifier_last_hidden, torch.load(tmp_path / "wanted.pt"), atol=2e-2, rtol=2e-2)
