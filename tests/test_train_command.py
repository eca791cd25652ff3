"""`dflash train`: one config by the serial engine, threads and torchrun; signals; refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from chat_tokenizer import chat_tokenizer, save_material
from patience import PATIENCE, wait_until
from safetensors.torch import load_file
from tiny_models import tiny_target

from dflash.__main__ import main
from dflash.errors import RunError
from dflash.launch import signals
from dflash.launch.rank import told
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.record import read_metrics
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.settings import RunConfig

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A target folder and conversations."""
    root = tmp_path_factory.mktemp("material")
    tokenizer = chat_tokenizer()
    save_material(root, tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    return root


def write_config(material, folder: Path, **changes) -> Path:
    values = dict(
        target=str(material / "target"),
        data=str(material / "data.jsonl"),
        pack_length=192,
        held_out=4,
        num_captured=2,
        drafter_layers=1,
        block_size=4,
        max_anchors=16,
        steps=8,
        packs_per_step=2,
        eval_every=8,
        checkpoint_every=100,
        dtype="float32",
        target_dtype="float32",
        lr=1e-3,
        warmup_steps=2,
        features="online",
        soft_labels=True,
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(RunConfig.from_parameters(**values | changes).to_dict()))
    return folder / "config.yaml"


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run)[0] if r["kind"] == "step"]


def kinds(run: Path) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for record in read_metrics(run)[0]:
        found.setdefault(record["kind"], []).append(record)
    return found


@pytest.fixture(scope="module")
def serial_run(material, tmp_path_factory):
    root = tmp_path_factory.mktemp("serial") / "runs"
    config = write_config(material, root / "serial")
    assert main(["train", "--config", str(config), "--runs", str(root)]) == 0
    return root / "serial"


def check_same(run: Path, reference: Path) -> None:
    assert losses(run) == pytest.approx(losses(reference), abs=1e-6) and len(losses(run)) == 8
    records, wanted = kinds(run), kinds(reference)
    assert records["run_end"][-1]["status"] == "completed" and "fault" not in records
    for a, b in zip(records["eval"], wanted["eval"], strict=True):
        assert a["acceptance_by_slot"] == pytest.approx(b["acceptance_by_slot"], abs=1e-6) and a["step"] == b["step"]
    mine, theirs = (load_file(latest_checkpoint(r) / "drafter.safetensors") for r in (run, reference))
    assert max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) < 1e-6
    stages = {r["name"] for r in records["stage"]}
    assert {"target[0]", "drafter[0]", "drafter[1]"} <= stages
    assert sum(r["tokens"] for r in records["stage"] if r["name"].startswith("drafter")) == sum(
        r["tokens"] for r in records["step"]
    )


def test_threads_give_the_serial_numbers(material, serial_run, tmp_path):
    config = write_config(material, tmp_path / "runs/threads", gpus="cpu:2", target_gpus="cpu:3")
    assert main(["train", "--config", str(config), "--runs", "runs"]) == 0
    check_same(tmp_path / "runs/threads", serial_run)
    with pytest.raises(RunError, match="--resume"):
        from dflash.launch.run import open_run

        open_run(config, RunConfig.load(config), False, Path("runs"))


def test_torchrun_gives_the_serial_numbers(material, serial_run, tmp_path, capsys):
    config = write_config(material, tmp_path / "runs/ranks", gpus="cpu:2", target_gpus="cpu:1", launcher="torchrun")
    assert main(["train", "--config", str(config)]) == 0, (tmp_path / "runs/ranks/torchrun.log").read_text()
    check_same(tmp_path / "runs/ranks", serial_run)
    shown = capsys.readouterr().out
    assert "completed after step 8" in shown
    assert "target[0] drafter[0] drafter[1]" in shown and "conversations" in shown, "roles and data, as threads print them"


@pytest.mark.slow
def test_ranks_go_on_where_threads_stopped(material, tmp_path):
    """A checkpoint is the same whoever wrote it: 4 steps by threads and 4 by ranks are 8 serial ones."""
    fixed = dict(min_lr_ratio=1.0, eval_every=100)
    wanted = write_config(material, tmp_path / "runs/wanted", **fixed)
    config = write_config(material, tmp_path / "runs/parts", gpus="cpu:2", target_gpus="cpu:1", **fixed | {"steps": 4})
    for path in (wanted, config):
        assert main(["train", "--config", str(path)]) == 0
    values = yaml.safe_load(config.read_text())
    values["train"]["steps"], values["runtime"]["launcher"] = 8, "torchrun"
    config.write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(config), "--resume"]) == 0
    assert losses(config.parent) == pytest.approx(losses(wanted.parent), abs=1e-6)


def start(config: Path, runs: Path):
    return subprocess.Popen(
        [sys.executable, "-m", "dflash", "train", "--config", str(config), "--runs", str(runs)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(run: Path, count: int, child) -> None:
    wait_until(lambda: len(losses(run)) >= count or child.poll() is not None, f"{count} steps")
    assert child.poll() is None, child.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_with_a_checkpoint(material, tmp_path, number):
    config = write_config(material, tmp_path / "runs/long", gpus="cpu:2", target_gpus="cpu:1", steps=100000)
    child = start(config, tmp_path / "runs")
    run = tmp_path / "runs/long"
    wait_for_steps(run, 3, child)
    child.send_signal(number)
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 128 + number, output
    end = kinds(run)["run_end"][-1]
    assert end["status"] == "interrupted" and end["step"] == len(losses(run))
    assert latest_checkpoint(run).name.endswith(f"{end['step']:08d}")


@pytest.mark.slow
def test_a_stop_ends_all_ranks_with_a_checkpoint(material, tmp_path):
    config = write_config(material, tmp_path / "runs/long", gpus="cpu:2", launcher="torchrun", steps=100000)
    run, child = tmp_path / "runs/long", start(config, tmp_path / "runs")
    wait_for_steps(run, 3, child)
    RunControl(run).stop()
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, output
    end = kinds(run)["run_end"][-1]
    assert end["status"] == "interrupted" and latest_checkpoint(run).name.endswith(f"{end['step']:08d}")


def test_a_failing_rank_is_named_with_its_traceback(material, tmp_path, capsys):
    config = write_config(
        material,
        tmp_path / "runs/broken",
        gpus="cpu:2",
        target_gpus="cpu:1",
        launcher="torchrun",
        attention="sdpa",
        max_dense_gib=1e-9,
    )
    assert main(["train", "--config", str(config)]) == 1
    records = kinds(tmp_path / "runs/broken")
    assert records["run_end"][-1]["status"] == "failed" and len(records["fault"]) == 1
    fault = records["fault"][0]
    assert fault["worker"].startswith("drafter[") and fault["type"] == "DenseAttentionTooLarge"
    shown = capsys.readouterr().err
    assert "DenseAttentionTooLarge" in shown and "check_dense_bytes" in shown


@pytest.mark.parametrize(
    "message, wanted",
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2", "drafter[0]: lost another rank: [gloo"),
        ("Connection reset by peer", "drafter[0]: lost another rank: Connection"),
        ("no such file", "drafter[0]: no such file"),
    ],
)
def test_a_rank_that_lost_another_one_does_not_call_itself_the_cause(message, wanted):
    assert told({"worker": "drafter[0]", "message": message}).startswith(wanted)


def test_ctrl_c_before_a_command_has_begun_is_no_traceback(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["train", "--config", "c.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_signals_within_a_second_are_one_wish_and_a_later_one_ends_it_now(monkeypatch):
    now, stops = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    for insist in (True, False):
        stopped = threading.Event()
        control = SimpleNamespace(stop=lambda event=stopped: (stops.append(1), event.set()))
        with graceful(control, announce=False, insist=insist) as received:
            signal.raise_signal(signal.SIGTERM)
            now[0] += 0.9
            signal.raise_signal(signal.SIGTERM)
            assert stopped.wait(PATIENCE) and received.number == signal.SIGTERM
            now[0] += 0.2
            if insist:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            else:
                signal.raise_signal(signal.SIGINT)
    assert len(stops) == 2


TINY = dict(
    target="random:tiny",
    data="random:6",
    pack_length=96,
    max_anchors=8,
    drafter_layers=1,
    num_captured=2,
    warm_start=False,
    features="online",
    eval_every=0,
    gpus="cpu",
)


def sets(**values) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def test_a_recipe_and_settings_need_no_file_and_a_run_goes_on_with_others(tmp_path, capsys):
    place = ["--runs", str(tmp_path / "runs"), "--run-id", "a"]
    assert main(["train", "--recipe", "cpu", *sets(**TINY, steps=2, lr="3e-3", gamma="none"), *place]) == 0
    run = tmp_path / "runs/a"
    config = RunConfig.load(run / "config.yaml")
    assert (config.recipe, config.train.steps, config.train.lr, config.train.gamma) == ("cpu", 2, 3e-3, None)
    assert config.drafter.block_size == 4 and len(losses(run)) == 2, "what nobody set is the recipe's"

    file = str(run / "config.yaml")
    assert main(["train", "--config", file, "--resume", *sets(steps=3)]) == 0
    assert len(losses(run)) == 3 and RunConfig.load(file).train.steps == 3, "where a later resume reads it"
    stood = (run / "config.yaml").read_text()
    assert main(["train", "--config", file, "--resume", *sets(drafter_layers=2)]) == 2
    assert (run / "config.yaml").read_text() == stood and "drafter_layers" in capsys.readouterr().err


def test_settings_from_the_command_line_win_over_a_file_of_your_own(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"recipe": "cpu", "train": {"steps": 5, "lr": 0.5}}))
    place = ["--runs", str(tmp_path / "runs"), "--run-id", "b"]
    assert main(["train", "--config", str(mine), *sets(**TINY, steps=1), *place]) == 0
    assert yaml.safe_load(mine.read_text())["train"]["steps"] == 5, "a file that is no run's is left alone"
    [run] = (tmp_path / "runs").iterdir()
    config = RunConfig.load(run / "config.yaml")
    assert (config.train.steps, config.train.lr) == (1, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr"], "wanted NAME=VALUE, for example lr=3e-3, got 'lr'"),
        (["--set", "lr=fast"], "lr must be float, got 'fast'"),
        (["--set", "learning_rate=1"], "unknown parameter 'learning_rate'"),
        (["--recipe", "huge"], "there is no recipe 'huge'"),
        (["--recipe", "cpu", "--config", "c.yaml"], "not allowed with argument --recipe"),
        (["--resume"], "give its --config"),
    ],
)
def test_a_command_line_that_cannot_work_is_one_sentence(arguments, message, capsys):
    try:
        code = main(["train", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err


def test_refusals(material, tmp_path, capsys):
    config = write_config(material, tmp_path / "runs/x", gpus="5,6,7")
    assert main(["train", "--config", str(config), "--runs", str(tmp_path / "runs")]) == 2
    assert "gpus=5,6,7 asks for GPU 5, but this machine has" in capsys.readouterr().err
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    wide = tmp_path / "wide.yaml"
    wide.write_text(config.read_text().replace("packs_per_step: 2", "packs_per_step: 1000000000"))
    assert main(["train", "--config", str(wide), "--runs", str(tmp_path / "runs")]) == 2
    assert "packs_per_step must be at most 4096, got 1000000000" in capsys.readouterr().err
    elsewhere = tmp_path / "mine.yaml"
    elsewhere.write_text(config.read_text())
    assert main(["train", "--config", str(elsewhere), "--resume"]) == 2
    assert "--resume needs the config.yaml of a run folder" in capsys.readouterr().err
