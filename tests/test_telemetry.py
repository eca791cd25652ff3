"""The run folder and metrics.jsonl: strict JSON, torn lines, many threads, the sampler, control, worker logs."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time

import numpy as np
import pytest
import torch
import yaml
from patience import PATIENCE, wait_until

from dflash.__main__ import main
from dflash.errors import RunError
from dflash.launch.background import BackgroundRun
from dflash.runs.control import RunControl
from dflash.runs.record import DeviceSampler, MetricsWriter, Run, read_metrics
from dflash.runs.worker_log import worker_output


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path, {"steps": 3}, "r")
    yield run
    run.metrics.close()


def kinds(path, kind):
    return [record for record in read_metrics(path)[0] if record["kind"] == kind]


def test_values_of_other_libraries_become_strict_json(run):
    run.metrics.write(
        "step",
        loss=torch.tensor(float("nan")),
        lr=np.float32(0.5),
        accuracy=torch.tensor([0.25, float("inf")]),
        count=np.int64(3),
        flag=np.bool_(True),
        nested={"a": (1, np.nan)},
        path=run.path,
    )
    line = (run.path / "metrics.jsonl").read_text().splitlines()[-1]
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None and "loss" in record
    assert record["accuracy"] == [0.25, None] and record["lr"] == 0.5 and record["count"] == 3
    assert record["flag"] is True and record["nested"] == {"a": [1, None]} and record["path"] == str(run.path)


def test_create_writes_config_and_environment_and_refuses_a_second_run(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.ipynb").write_text("{}")  # an executed notebook alone is no run
    run = Run.create(tmp_path, {"train": {"steps": 3}}, "r")
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"train": {"steps": 3}}
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert kinds(run.path, "run_start")[0]["run_id"] == "r"
    with pytest.raises(RunError, match="already holds a run; choose another run_id"):
        Run.create(tmp_path, {}, "r")
    with pytest.raises(RunError, match="not a plain folder name"):
        Run.create(tmp_path, {}, "../r")
    with pytest.raises(RunError, match="holds no run"):
        Run.open(tmp_path / "nothing")
    assert Run.create(tmp_path, {}).id != Run.create(tmp_path, {}).id


def test_reading_continues_and_leaves_a_torn_line_for_later(run):
    path = run.path / "metrics.jsonl"
    records, offset = read_metrics(run.path)
    assert [r["kind"] for r in records] == ["run_start"]
    with open(path, "a") as file:
        file.write('{"kind":"step","step":1}\n{"kind":"st')
    records, offset = read_metrics(run.path, offset)
    assert [r.get("step") for r in records] == [1]
    with open(path, "a") as file:
        file.write('ep","step":2}\nnot json\n{"kind":"step","step":3}\n')
    records, offset = read_metrics(path, offset)
    assert [r.get("step") for r in records] == [2, 3]
    assert read_metrics(path, offset) == ([], offset)
    path.write_text('{"kind":"step","step":9}\n')  # replaced by a shorter file
    assert [r["step"] for r in read_metrics(path, offset)[0]] == [9]
    assert read_metrics(run.path / "absent.jsonl") == ([], 0)


def test_a_record_after_a_torn_line_is_not_lost(run):
    run.metrics.close()
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"step","st')
    again = Run.open(run.path)
    again.metrics.write("step", step=7)
    assert kinds(run.path, "step")[0]["step"] == 7


def test_small_reads_see_every_record_once(run):
    for step in range(50):
        run.metrics.write("step", step=step)
    seen, offset = [], 0
    while True:
        records, new = read_metrics(run.path, offset, max_bytes=64)
        if new == offset:
            break
        seen += [r["step"] for r in records if r["kind"] == "step"]
        offset = new
    assert seen == list(range(50))


def test_eight_threads_write_whole_lines(run):
    def write(worker):
        for step in range(200):
            run.metrics.write("log", worker=worker, message=f"{step} " + "x" * 300)

    threads = [threading.Thread(target=write, args=(w,)) for w in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    logs = kinds(run.path, "log")
    assert len(logs) == 1600
    for worker in range(8):
        assert [int(r["message"].split()[0]) for r in logs if r["worker"] == worker] == list(range(200))


def test_a_full_disk_is_announced_once_and_does_not_raise(tmp_path, monkeypatch, capsys):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash.runs.record.os.write", full)
    writer.write("step", step=1)
    writer.write("step", step=2)
    assert writer.dropped == 2
    assert capsys.readouterr().err.count("No space left") == 1


def test_sinks_get_each_record_and_late_writes_are_ignored(tmp_path):
    seen = []
    run = Run.create(tmp_path, {}, "r", sinks=[seen.append])
    run.metrics.write("step", step=1)
    run.end("completed", step=1)
    run.metrics.write("device", device="cpu")
    assert [r["kind"] for r in seen] == ["run_start", "step", "run_end"]
    assert not kinds(run.path, "device")


def test_a_fault_keeps_its_traceback(run):
    try:
        raise ValueError("wanted 3, got 4")
    except ValueError as error:
        run.fault(error, worker="drafter[1]", step=12)
    fault = kinds(run.path, "fault")[0]
    assert (fault["worker"], fault["type"], fault["message"], fault["step"]) == (
        "drafter[1]",
        "ValueError",
        "wanted 3, got 4",
        12,
    )
    assert "raise ValueError" in json.loads((run.path / "failure.json").read_text())["traceback"]


def test_the_sampler_sees_this_process(run):
    with DeviceSampler(run.metrics, ["cpu"], interval=0.05):
        block = bytearray(64 << 20)
        wait_until(lambda: sum(block[:1000]) or len(kinds(run.path, "device")) >= 3, "three samples", every=0.001)
    samples = kinds(run.path, "device")
    assert all(s["device"] == "cpu" and s["used"] > 64 << 20 and s["total"] > s["used"] for s in samples)
    assert samples[-1]["peak"] >= samples[-1]["used"] - 1 and samples[1]["utilization"] > 0


def test_a_folder_that_is_no_run_is_not_asked_anything(run, tmp_path, capsys):
    (tmp_path / "d").mkdir()
    for folder, what in ((tmp_path / "d", "holds no run"), (tmp_path / "absent", "is no folder")):
        assert main(["control", str(folder), "stop"]) == 2
        assert f"{folder} {what}; give the folder of a run" in capsys.readouterr().err
    assert not list((tmp_path / "d").iterdir())
    assert main(["control", str(run.path), "stop"]) == 0 and (run.path / "control.json").exists()


def test_control_reaches_another_process_by_its_file(run):
    here, there = RunControl(run.path, run.metrics, poll_interval=0.01), RunControl(run.path)
    assert here.at_step()
    there.ask("checkpoint")
    there.ask("evaluate")
    time.sleep(0.02)
    done = []
    assert here.at_step(checkpoint=lambda: done.append("c"), evaluate=lambda: done.append("e"))
    assert done == ["c", "e"]
    assert here.at_step(checkpoint=lambda: done.append("again")) and done == ["c", "e"]
    there.stop()
    time.sleep(0.02)
    assert not here.at_step()
    assert RunControl(run.path).at_step()  # a stop belongs to the loop that was running, not to a resumed one
    heir = RunControl(run.path, handled=here.handled())  # as the ranks of a launcher: what came since is theirs
    assert heir.poll().stop and not heir.poll().checkpoint
    with pytest.raises(RunError, match="unknown action 'restart'; choose one of pause"):
        here.ask("restart")


def test_a_pause_holds_the_loop_beats_its_heart_and_still_serves_requests(run):
    control = RunControl(run.path, run.metrics, poll_interval=0.01)
    beats, saved, passed = [], [], threading.Event()
    control.ask("pause")

    def loop():
        control.at_step(checkpoint=lambda: saved.append(1), heartbeat=lambda: beats.append(1))
        passed.set()

    thread = threading.Thread(target=loop)
    thread.start()
    wait_until(lambda: len(beats) > 3)
    control.ask("checkpoint")
    wait_until(lambda: saved)
    beats.clear()
    wait_until(lambda: len(beats) > 3)
    assert saved == [1] and not passed.is_set()
    control.ask("resume")
    assert passed.wait(PATIENCE)
    thread.join()
    assert [r["state"] for r in kinds(run.path, "control")] == ["paused", "checkpoint done", "resumed"]


def test_worker_lines_go_to_the_record_and_nowhere_else(run, capsys):
    def work(name):
        with worker_output(run.metrics, name, run.path / "logs"):
            for number in range(20):
                print(f"line {number}")
            for percent in (0, 50, 100):
                print(f"\r{percent}%", end="")
            print()
            print("careful", file=sys.stderr)
            logging.getLogger("dflash.test").warning("logged")
            print("last words", end="")

    threads = [threading.Thread(target=work, args=(f"drafter[{n}]",)) for n in range(8)]
    [t.start() for t in threads]
    print("the cell's own line")
    [t.join() for t in threads]
    out = capsys.readouterr()
    assert out.out == "the cell's own line\n" and out.err == ""
    for n in range(8):
        lines = [r["message"] for r in kinds(run.path, "log") if r["worker"] == f"drafter[{n}]"]
        assert lines[:20] == [f"line {i}" for i in range(20)]
        assert lines[20] == "100%" and lines[-1] == "last words"
        assert {"careful", "logged"} <= set(lines)
        assert (run.path / "logs" / f"drafter_{n}.log").read_text().startswith("line 0\nline 1\n")
    assert type(sys.stdout).__name__ != "_Router"


def test_a_background_run_returns_at_once_and_carries_its_result(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    gate = threading.Event()
    job = BackgroundRun(run, lambda control: gate.wait(PATIENCE) and "done").start()
    assert job.running
    with pytest.raises(RunError, match="still running after"):
        job.wait(timeout=0.05)
    gate.set()
    assert job.wait(PATIENCE) == "done"
    assert kinds(run.path, "run_end")[0]["status"] == "completed"


def test_a_background_failure_is_raised_where_it_is_waited_for(tmp_path):
    run = Run.create(tmp_path, {}, "r")

    def train(control):
        raise ArithmeticError("loss is gone")

    job = BackgroundRun(run, train, worker="drafter[2]").start()
    with pytest.raises(ArithmeticError, match="loss is gone"):
        job.wait(PATIENCE)
    assert kinds(run.path, "fault")[0]["worker"] == "drafter[2]"
    assert kinds(run.path, "run_end")[0]["status"] == "failed"


def test_a_background_run_stops_on_request(tmp_path):
    run, stepped = Run.create(tmp_path, {}, "r"), threading.Event()

    def train(control):
        steps = 0
        while control.at_step():
            steps += 1
            stepped.set()
            time.sleep(0.01)
        return steps

    job = BackgroundRun(run, train, control=RunControl(run.path, run.metrics, poll_interval=0.01)).start()
    assert stepped.wait(PATIENCE)
    job.stop()
    assert job.wait(PATIENCE) >= 1
    assert kinds(run.path, "run_end")[0]["status"] == "interrupted"


def test_library_progress_bars_are_off_in_the_background_and_back_afterwards(tmp_path):
    from transformers.utils import logging as library

    library.enable_progress_bar()
    run = Run.create(tmp_path, {}, "r")
    job = BackgroundRun(run, lambda control: library.is_progress_bar_enabled()).start()
    assert job.wait(PATIENCE) is False
    assert library.is_progress_bar_enabled()
