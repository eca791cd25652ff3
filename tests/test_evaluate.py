"""The evaluate command: exactness with margins, thinking mode, intervals, and the whole command on a tiny run."""

import json
from collections import Counter

import pytest
import torch
import yaml
from chat_tokenizer import chat_tokenizer
from tiny_models import random_drafter, tiny_target

from dflash.__main__ import main
from dflash.devices import device_named, dtype_named
from dflash.errors import ConfigError, RunError
from dflash.evaluate import batch
from dflash.evaluate import texts as evaluation
from dflash.evaluate.decoding import Decoding, plain_generate, speculative_generate
from dflash.evaluate.texts import (
    Prompt,
    bootstrap_interval,
    chunk_texts,
    compare_modes,
    evaluate_prompts,
    first_difference,
    summarize_prompts,
    thinking_mode,
)
from dflash.evaluate.whole import EvaluateOptions, drafter_folder, evaluate, table, write_evaluation
from dflash.train.checkpoint import save_checkpoint
from dflash.train.settings import RunConfig
from dflash.views import progress

PROMPTS = [Prompt((3, 17, 5, 42), "one"), Prompt((8, 11, 29, 33, 2, 50), "two"), Prompt((7, 7, 9), "three")]


# -- exactness (case 50) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_float32_text_is_exact(kind):
    target = tiny_target(kind)
    results = evaluate_prompts(target, random_drafter(target), PROMPTS, Decoding(24))
    summary = summarize_prompts(results, 5)
    assert summary["exact"] == summary["compared"] == 3 and summary["lossless"] is True
    assert [result.difference for result in results] == [None] * 3
    for result in results:
        assert result.tokens == 24 and result.seconds > 0 and result.plain_seconds > 0
        assert sum(result.gains) == 23 and len(result.chunks) == result.target_calls + 1
    assert summary["acceptance_length"] == 69 / sum(result.target_calls for result in results)
    speeds = sorted(r.plain_seconds / r.seconds for r in results)
    assert summary["speedup"] == speeds[1] and summary["speedup_spread"] == [speeds[0], speeds[2]]
    results[0].seconds *= 100  # one prompt met a busy moment of the machine
    assert summarize_prompts(results, 5)["speedup"] >= speeds[0] > summarize_prompts(results, 5)["speedup_spread"][0]


def test_a_decoder_that_keeps_a_wrong_draft_fails_with_its_margin(monkeypatch):
    """The fault that 'it is only bf16 rounding' can hide: a draft accepted where the target wanted another token."""
    target = tiny_target(dtype=torch.bfloat16)
    drafter = random_drafter(target).to(torch.bfloat16)

    def lenient(drafts, wanted, room):
        if drafts.shape[1]:  # the first draft is written whatever the target wanted
            wanted[:, 0] = torch.where(room > 0, drafts[:, 0], wanted[:, 0])
        return room.clamp(max=min(1, drafts.shape[1]))

    monkeypatch.setattr(batch, "standing", lenient)
    summary = summarize_prompts(evaluate_prompts(target, drafter, PROMPTS, Decoding(24)), 5)
    assert summary["lossless"] is False and summary["exact"] < 3
    tie = next(result["difference"] for result in summary["prompts"] if result["difference"])
    assert tie["wide"] and abs(tie["margin"]) > 2 * tie["noise"] and tie["plain_token"] != tie["speculative_token"]


def test_a_near_tie_is_told_from_a_fault():
    """Two head rows made equal but for rounding: whichever token is written, the target cannot tell."""
    target = tiny_target(dtype=torch.bfloat16)
    prompt = list(PROMPTS[0].ids)
    text = plain_generate(target, prompt, 6, eos_token_ids=[]).tokens
    twin = next(token for token in range(60) if token not in text)
    with torch.no_grad():
        target.head_weight[twin] = target.head_weight[text[5]]
    tie = first_difference(target, prompt, [*text[:5], twin], text, 4)
    assert (tie.index, tie.plain_token, tie.speculative_token) == (5, text[5], twin) and not tie.wide
    other = next(token for token in range(60) if token not in (*text, twin))
    wrong = first_difference(target, prompt, [*text[:5], other], text, 4)
    assert wrong.wide and wrong.margin > 2 * wrong.noise > 0


def test_bf16_text_is_lossless_up_to_near_ties():
    target = tiny_target(dtype=torch.bfloat16)
    drafter = random_drafter(target).to(torch.bfloat16)
    assert summarize_prompts(evaluate_prompts(target, drafter, PROMPTS, Decoding(40)), 5)["lossless"]


def test_sampling_claims_no_exactness():
    target = tiny_target()
    summary = summarize_prompts(evaluate_prompts(target, random_drafter(target), PROMPTS, Decoding(12, temperature=0.8)), 5)
    assert summary["exact"] is None and summary["lossless"] is None and summary["compared"] == 0
    assert summary["speedup"] is not None


def test_interval_of_the_ratio():
    pairs = [(30, 20), (10, 10), (44, 20), (12, 11), (25, 14)] * 8
    low, high = bootstrap_interval(pairs)
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    assert low < ratio < high and high - low < 0.5
    assert bootstrap_interval(pairs) == (low, high)
    assert bootstrap_interval([(6, 3)] * 5) == (2.0, 2.0)
    assert bootstrap_interval([(6, 3)]) is None and bootstrap_interval([(0, 0), (6, 3)]) is None


def test_chunks_of_text_join_to_the_whole():
    tokenizer = chat_tokenizer()
    ids = tokenizer("né, 日本", add_special_tokens=False)["input_ids"]
    for width in (1, 2, 3):
        chunks = [ids[i : i + width] for i in range(0, len(ids), width)]
        texts = chunk_texts(tokenizer, chunks)
        assert "".join(texts) == "né, 日本" and len(texts) == len(chunks)


# -- thinking mode (case 49) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, answer, mode",
    [
        ("<|im_start|>assistant\n<think>\n", "", evaluation.THINKING),
        ("<|im_start|>assistant\n", "<think>\nLet me", evaluation.THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hello", evaluation.CLOSED),
        ("<|im_start|>assistant\n", "Hello <think>", evaluation.PLAIN),
        ("user: what does <think> mean?\nassistant\n", "It", evaluation.PLAIN),
    ],
)
def test_thinking_mode(prompt, answer, mode):
    assert thinking_mode(prompt, answer) == mode


def test_mode_mismatch_is_a_warning():
    trained = Counter({evaluation.THINKING: 90, evaluation.PLAIN: 10})
    warning = compare_modes([evaluation.CLOSED] * 3, trained)
    assert "90%" in warning and "--thinking on" in warning and "3 of 3" in warning
    assert compare_modes([evaluation.THINKING] * 3, trained) is None
    assert compare_modes([evaluation.CLOSED], Counter()) is None


# -- the command --------------------------------------------------------------------------------------------------


def tiny_run(tmp_path, monkeypatch):
    """A run folder with a checkpoint, target-written conversations, and a loadable target folder."""
    tokenizer = chat_tokenizer()
    target = tiny_target(vocab_size=len(tokenizer))
    target.tokenizer = tokenizer
    folder = tmp_path / "target"
    target.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = []
    for word in ("hello", "why", "what is it", "yes", "no", "tell me"):
        messages = [{"role": "user", "content": word}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append({"prompt_ids": prompt, "response_ids": plain_generate(target, prompt, 20).tokens})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "runs" / "one"
    (run / "checkpoints").mkdir(parents=True)
    config = RunConfig.from_parameters(target=str(folder), data=str(data), pack_length=128, held_out=3)
    (run / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    drafter = random_drafter(target, block_size=4)
    save_checkpoint(run, 2, drafter, str(folder), {})
    (run / "checkpoints" / "step-00000009").mkdir()  # half-written
    return run, data, drafter


def test_command_on_a_run(tmp_path, monkeypatch, capsys):
    run, data, _ = tiny_run(tmp_path, monkeypatch)
    assert main(["evaluate", "--run", str(run), "--max-new-tokens", "10", "--limit", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "<|begin|>user\n" in out and "step-00000002" in out and "bonus token included" in out
    for done in (
        "decoding with the drafter: 20 of 20 tokens",
        "decoding plainly: 20 of 20 tokens",
        "speed, one prompt at a time: 2 of 2 prompts",
        "replaying decoding over held-out answers: 2 of 2 conversations",
        "comparing training with decoding: 2 of 2 held-out answers",
    ):
        assert done in out
    saved = json.loads((run / "evaluation.json").read_text())
    assert len(saved["prompts"]) == 2 and saved["exact"] == 2 and saved["lossless"] is True
    assert len(saved["acceptance_by_slot"]) == 3 and len(saved["histogram"]) == 4 and saved["block_size"] == 4
    assert set(saved["prompts"][0]) >= {
        "prompt",
        "chunks",
        "acceptance_length",
        "tokens",
        "target_calls",
        "seconds",
        "plain_seconds",
        "exact",
    }
    assert saved["held_out"]["blocks"] > 0 and saved["parity"]["agrees"] and saved["warnings"] == []
    assert saved["parity"]["largest_gap"] == 0
    assert (run / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_follow_the_device_and_what_was_asked():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    sizes = [(o.limit, o.max_new_tokens, o.parity_responses) for o in (EvaluateOptions("x").sized(d) for d in (cpu, cuda))]
    assert sizes == [(8, 64, 2), (64, 160, 8)]
    small = EvaluateOptions("x", limit=1, max_new_tokens=8).sized(cpu)
    assert (small.limit, small.max_new_tokens, small.parity_responses) == (1, 8, 1)
    assert EvaluateOptions("x", limit=1, parity_responses=6).sized(cpu).parity_responses == 6
    assert EvaluateOptions("x", parity_responses=0).sized(cpu).parity_responses == 0


def test_work_without_a_terminal_says_how_far_it_is(monkeypatch):
    lines: list[str] = []
    clock = iter([0.0, 4.0, 12.0, 30.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.Work("reading", 8, "books", lines.append) as line:
        assert list(line.over("abc")) == ["a", "b", "c"]
    assert lines == [
        "reading: 2 of 8 books, 12 s, 36 s left",
        "reading: 3 of 8 books, 30 s, 50 s left",
        "reading: 3 of 8 books, 40 s",
    ]


def test_command_on_a_drafter_with_prompts(tmp_path, monkeypatch, capsys):
    run, data, _ = tiny_run(tmp_path, monkeypatch)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("how are you\nand now\n")
    out = tmp_path / "deep" / "out.json"
    code = main(
        [
            "evaluate",
            "--drafter",
            str(run / "checkpoints/step-00000002"),
            "--prompts",
            str(prompts),
            "--json",
            str(out),
            "--temperature",
            "0.7",
            "--max-new-tokens",
            "6",
            "--device",
            "cpu",
            "--no-plain",
        ]
    )
    assert code == 0
    saved = json.loads(out.read_text())
    assert saved["temperature"] == 0.7 and saved["speedup"] is None and saved["held_out"] is None
    assert "how are you" in saved["rendered_prompt"]


def test_thinking_mismatch_reaches_the_summary(tmp_path, monkeypatch):
    run, data, _ = tiny_run(tmp_path, monkeypatch)
    tokenizer = chat_tokenizer()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    mark = tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
    data.write_text("".join(json.dumps(row | {"response_ids": mark + row["response_ids"]}) + "\n" for row in rows))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("how are you\n")
    summary = evaluate(
        EvaluateOptions(run=str(run), prompts=str(prompts), max_new_tokens=4, device="cpu", parity_responses=0),
        say=lambda text: None,
    )
    assert len(summary["warnings"]) == 1 and "--thinking on" in summary["warnings"][0]
    assert "WARNING" in table(summary)


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="either a run folder"):
        EvaluateOptions()
    with pytest.raises(ConfigError, match="at least 1"):
        EvaluateOptions(run="x", limit=0)
    for name, value, wanted in (
        ("temperature", -0.5, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("max_new_tokens", 0, "at least 1"),
        ("seed", 2**63, "between"),
        ("seed", -(2**64), "between"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be {wanted}"):
            EvaluateOptions(run="x", **{name: value})
    with pytest.raises(ConfigError, match="dtype must be one of"):
        dtype_named("float99")
    for name, message in (
        ("gpu", "no device 'gpu'"),
        ("cuda:77", "cuda:77 is not here, this machine has"),
        ("mps", "of type 'mps', and only cpu and cuda work"),
        ("meta", "of type 'meta'"),
    ):
        with pytest.raises(ConfigError, match=message):
            device_named(name)
    with pytest.raises(RunError, match="no run at"):
        drafter_folder(EvaluateOptions(run=str(tmp_path)))
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(RunError, match="no complete checkpoint"):
        drafter_folder(EvaluateOptions(run=str(tmp_path)))


def test_numbers_that_json_cannot_hold(tmp_path):
    path = write_evaluation({"a": float("nan"), "b": [float("inf"), 1.0], 3: (1, 2)}, tmp_path / "e.json")
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.0], "3": [1, 2]}


def test_speculative_and_plain_share_a_clock():
    target = tiny_target()
    decoded = speculative_generate(target, random_drafter(target), [1, 2, 3], 8, eos_token_ids=[])
    assert 0 < decoded.prefill_seconds < decoded.seconds
