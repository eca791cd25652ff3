"""dflash serve-check: does a server give the target's own text with this drafter, and the acceptance that we measure?

Held-out prompts are decoded by our decoding, and sent to a vLLM server with the drafter and to one without it, several at
a time. Compared are the texts, the number of drafts that stood in every round, and tokens per second; training's view of
the same texts stands beside them. The server is started from an environment of its own (`server`), or is up already.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.data import prompt_reader
from dflash.data.generate.endpoint import Endpoint
from dflash.data.generate.prompts import read_prompts
from dflash.devices import device_named, dtype_named
from dflash.drafter.export import drafter_layout, open_drafter
from dflash.errors import ConfigError, RunError, refuse_below
from dflash.evaluate.batch import generate
from dflash.evaluate.decoding import DecodeResult, Decoding
from dflash.evaluate.delivery import ExportOptions, deliver, refuse_other_target
from dflash.evaluate.rounds import Ours, figures, same_rounds, trimmed
from dflash.evaluate.texts import first_difference
from dflash.evaluate.verdict import problems
from dflash.runs.record import plain, run_folder
from dflash.target.capture import Target, load_target
from dflash.target.folder import is_folder, write_target_folder
from dflash.target.loading import load_config, resolve_source
from dflash.target.server import Server, choose_port, healthy, require_vllm
from dflash.target.serving import serve_lines
from dflash.train.prepare import prepare_data
from dflash.train.resolve import recall
from dflash.train.resolved import ResolvedRun
from dflash.views.progress import Work

LAYOUTS = ("zlab", "speculators")
SERVERS = ("without a drafter", "with the drafter")
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """What to check. Either `server_python`, of an environment with vLLM, or `url`, a server that is up."""

    run: str
    server_python: str | None = None
    url: str | None = None
    layout: str = "zlab"
    drafter: str | None = None  # an export to check; None: the run's newest checkpoint, exported into the run folder
    prompts: str | None = None  # file of prompts; None: the run's held-out conversations
    limit: int = 16  # prompts
    max_new_tokens: int = 96
    concurrency: tuple[int, ...] = (1, 4, 16)  # requests at a time; the first is what acceptance is compared at
    dtype: str = "float32"
    device: str = "cpu"  # of our own decoding; a server on the same GPU leaves it room (server_args)
    plain: bool = True  # start a server without the drafter too
    draft_tokens: int | None = None  # drafts checked in a call; None: all of the block
    port: int | None = None
    timeout: float = 600.0  # seconds that a server may take to load
    server_args: str = ""  # more arguments of `vllm serve`

    def __post_init__(self) -> None:
        if (self.server_python is None) == (self.url is None):
            raise ConfigError(
                "give either the Python of an environment with vLLM (--server-python) or --url, not both or none"
            )
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if not self.concurrency:
            raise ConfigError("concurrency is empty; give how many requests at a time, such as 1,4,16")
        refuse_below(1, limit=self.limit, max_new_tokens=self.max_new_tokens, concurrency=min(self.concurrency))


@dataclass(frozen=True)
class Answer:
    """One text of a server. `accepted`: drafts that stood in each call, None from a server without a drafter."""

    tokens: list[int]
    stopped: bool
    accepted: list[int] | None


@dataclass(frozen=True)
class Case:
    """What is served, and our side of it."""

    target: Target
    drafter: Any
    export: Path
    target_folder: Path
    prompts: list[list[int]]
    most: int  # drafts checked in a call


def serve_check(options: ServeOptions, say: Say = print) -> dict[str, Any]:
    """Run the check; returns what `served/check.json` in the run folder holds. Raises ConfigError, RunError, TargetError."""
    folder = run_folder(options.run) / "served"
    if options.url is None:
        require_vllm(options.server_python)
        choose_port(options.port)
    elif not healthy(options.url):
        raise RunError(f"no server answers at {options.url}/health; start it, or give --server-python")
    case = prepare_case(options, folder, say)
    say(f"our decoding: {len(case.prompts)} prompts, {options.dtype}")
    eos = case.target.end_ids
    how, total = Decoding(options.max_new_tokens, max_draft=case.most), options.max_new_tokens * len(case.prompts)
    with Work("  plainly", total, "tokens", say) as line:
        plain_texts = generate(case.target, None, case.prompts, how, line.to)
    with Work("  with the drafter", total, "tokens", say) as line:
        ours = generate(case.target, case.drafter, case.prompts, how, line.to)
    summary: dict[str, Any] = {
        "options": plain(asdict(options)),
        "export": str(case.export),
        "block_size": case.drafter.block_size,
        "prompts": len(case.prompts),
        "tokens": sum(len(text.tokens) for text in plain_texts),
        "ours_exact": sum(a.tokens == b.tokens for a, b in zip(ours, plain_texts, strict=True)),
        "lines": serve_lines(options.layout, str(case.export), str(case.target_folder), case.drafter.block_size),
        "servers": {},
    }
    for name in SERVERS if options.plain and options.url is None else SERVERS[1:]:
        with ExitStack() as stack:
            url = options.url
            if url is None:
                arguments = server_arguments(options, case, name == SERVERS[1])
                log = folder / f"{options.layout}-{name.split()[0]}.log"
                say(f"server {name}: loading, its log is {log}")
                url = stack.enter_context(Server(options.server_python, arguments, log, options.port, options.timeout)).url
            answers = [
                _ask(url, case.prompts, options.max_new_tokens, count, set(eos), say) for count in options.concurrency
            ]
        summary["servers"][name] = [
            _told(case, found, seconds, plain_texts) | {"concurrency": count}
            for count, (found, seconds) in zip(options.concurrency, answers, strict=True)
        ]
    served = answers[0][0]
    summary |= _acceptance(case, ours, plain_texts, served, set(eos))
    summary["problems"] = problems(summary)
    folder.mkdir(exist_ok=True)
    (folder / "check.json").write_text(json.dumps(plain(summary), indent=1) + "\n")
    return summary


def prepare_case(options: ServeOptions, folder: Path, say: Say) -> Case:
    """The export and the target's folder, both in the run folder where none is named, and our own target and drafter."""
    device, dtype = device_named(options.device), dtype_named(options.dtype)
    resolved = recall(run_folder(options.run))
    name = resolve_source(resolved.target.name).location if resolved.target.served else resolved.target.name
    export = Path(options.drafter) if options.drafter else folder / options.layout
    target_folder = Path(name).expanduser() if is_folder(name) else folder.parent / "target"  # as `dflash report` names it
    if options.drafter is None:
        shutil.rmtree(export, ignore_errors=True)
        written = None if is_folder(name) else str(target_folder)
        deliver(ExportOptions(options.layout, str(export), run=options.run, target_folder=written))
    settings = drafter_layout(export)
    refuse_other_target(settings, load_config(resolve_source(name)), str(export), str(name))
    layout = settings.get("layout")
    if options.url is None and layout != options.layout:
        told = f"--format {layout} serves it" if layout else "`dflash export` writes one that servers load"
        raise ConfigError(f"{export} is no drafter in the {options.layout} layout; {told}")
    drafted = settings["block_size"] - 1
    if options.draft_tokens is not None and not 1 <= options.draft_tokens <= drafted:
        raise ConfigError(
            f"draft_tokens is {options.draft_tokens}, and the drafter's block of {settings['block_size']} has {drafted} "
            f"drafts; give 1 to {drafted} (vLLM takes more, and never accepts the rest)"
        )
    if options.url is None and not is_folder(target_folder):
        say(f"writing the target to {target_folder}")
        write_target_folder(name, target_folder)
    target = load_target(name, device, dtype, list(settings["target_layer_ids"]))
    drafter = open_drafter(export, target, dtype).eval()
    prompts = _prompts(options, resolved, target, say)
    return Case(target, drafter, export.resolve(), target_folder.resolve(), prompts, options.draft_tokens or drafted)


def _prompts(options: ServeOptions, resolved: ResolvedRun, target: Target, say: Say) -> list[list[int]]:
    if options.prompts:
        questions = read_prompts(options.prompts)
        found = [list(ids) for _, ids in questions.rendered(prompt_reader(target.tokenizer, {}))]
        if questions.report.skipped:
            say(f"prompts left out of {options.prompts}:\n{questions.report.reasons()}")
    else:
        found = [list(item.input_ids[: item.loss_mask.index(True)]) for item in prepare_data(resolved).held_out]
    if not found:
        raise ConfigError("the run holds no conversations out, so there are no prompts; give --prompts FILE")
    return found[: options.limit]


def server_arguments(options: ServeOptions, case: Case, drafted: bool) -> list[str]:
    """Arguments of `vllm serve`. The two layouts are served as their users do."""
    longest = max(map(len, case.prompts)) + options.max_new_tokens + 2 * case.drafter.block_size
    alone = drafted and options.layout == "speculators" and case.most == case.drafter.block_size - 1
    arguments = [str(case.export if alone else case.target_folder)]
    arguments += ["--dtype", options.dtype, "--max-model-len", str(-(-longest // 64) * 64), "--enforce-eager"]
    arguments += ["--no-enable-prefix-caching", "--served-model-name", "target"]
    if drafted:
        arguments += ["--per-request-spec-decode-metrics", "detailed"]
    if drafted and not alone:
        settings = {"method": "dflash", "model": str(case.export), "num_speculative_tokens": case.most}
        arguments += ["--speculative-config", json.dumps(settings)]
    return arguments + shlex.split(options.server_args)


def _ask(
    url: str, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int, ends: set[int], say: Say
) -> tuple[list[Answer], float]:
    """Every prompt's greedy text, `concurrency` requests at a time, and the seconds that all took."""
    endpoint = Endpoint(url, retries=0)

    def one(ids: list[int], limit: int = max_new_tokens) -> Answer:
        body = {"model": endpoint.model, "prompt": ids, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
        reply = endpoint.call("POST", "/completions", body)
        choice = reply["choices"][0]
        tokens = choice.get("token_ids")
        if not tokens:
            raise RunError(f"{url} gives no token ids; wanted a vLLM server that knows `return_token_ids`")
        drafts = ((reply.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
        return Answer(tokens, tokens[-1] in ends, drafts)

    one(prompts[0], 4)  # first calls are slow: not timed
    start = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool, Work(f"  {concurrency} at a time", len(prompts), "prompts", say) as line:
        answers = list(line.over(pool.map(one, prompts)))
    return answers, time.monotonic() - start


def _told(case: Case, answers: Sequence[Answer], seconds: float, wanted: Sequence[DecodeResult]) -> dict[str, Any]:
    """One pass over the prompts: speed, and how the texts agree with our plain text."""
    differing = []
    for number, (answer, text) in enumerate(zip(answers, wanted, strict=True)):
        if answer.tokens != text.tokens:
            tie = first_difference(case.target, case.prompts[number], answer.tokens, text.tokens, case.drafter.block_size)
            differing.append(
                {"prompt": number, "index": tie.index, "margin": tie.margin, "noise": tie.noise, "wide": tie.wide}
            )
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "identical": len(answers) - len(differing),
        "differing": differing,
    }


def _acceptance(
    case: Case, decoded: Sequence[DecodeResult], texts: Sequence[DecodeResult], served: Sequence[Answer], ends: set[int]
) -> dict[str, Any]:
    """Acceptance of training, of our decoding and of the server, over the prompts whose texts agree."""
    if any(answer.accepted is None for answer in served):
        raise RunError(
            "the server does not tell how many drafts stood in each call; start it with a drafter and with "
            "--per-request-spec-decode-metrics detailed (vLLM 0.32 or later)"
        )
    same = [n for n, answer in enumerate(served) if answer.tokens == texts[n].tokens and answer.tokens == decoded[n].tokens]
    walks = {"training": [], "ours": [], "server": []}
    sides = []
    for n in same:
        answer = served[n]
        own = Ours(case.target, case.drafter, case.prompts[n], answer.tokens, case.most)
        sides.append(own)
        walks["training"].append(own.walk(answer.stopped))
        walks["ours"].append(trimmed(len(answer.tokens), decoded[n].accepted, answer.stopped))
        walks["server"].append(trimmed(len(answer.tokens), answer.accepted, answer.stopped))
    size = case.drafter.block_size
    calls = [count for answer in served for count in answer.accepted]
    return {
        "compared": len(same),
        **{name: figures(found, size) for name, found in walks.items()},
        "same_rounds": same_rounds(sides, walks["server"], size),
        "untrimmed_length": 1 + sum(calls) / max(1, len(calls)),
    }
