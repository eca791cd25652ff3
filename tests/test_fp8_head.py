"""The float8 head against a table of e4m3's values written from the format's definition, and the loss through it against
dense float64; where it cannot run it is refused before anything is loaded."""

from __future__ import annotations

import math
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from chat_tokenizer import chat_tokenizer, save_material
from tiny_models import TINY_STEP, tiny_target

from dflash.bench.workload import make_drafter, make_head, make_inputs
from dflash.distributed.replicas import copy_module
from dflash.drafter import fp8_head
from dflash.drafter.config import create_drafter_config
from dflash.drafter.fp8_head import Fp8Head, quantize_rows
from dflash.drafter.losses import chunked_head_loss
from dflash.drafter.model import DFlashDrafter
from dflash.errors import ConfigError
from dflash.launch.run import start_run
from dflash.train.memory import estimate
from dflash.train.prepare import make_drafter as drafter_of_a_run
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig
from dflash.train.topology import decide

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16]
NOISE = 0.036  # of a product, relative rms: each operand's mantissa is off by up to 1/16, evenly, on average by 0.0255


def e4m3_values() -> torch.Tensor:
    """Every finite value of 1 sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinities; sorted, [253] float64."""
    positive = {m / 8 * 2.0**-6 for m in range(8)}
    positive |= {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0}  # that code is NaN
    return torch.tensor(sorted(positive | {-v for v in positive}), dtype=torch.float64)


def wide_rows(dtype, rows=40, width=64):
    """Elements over six decades, rows over ten."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=g) * 10 ** (-6 * torch.rand(rows, width, generator=g))
    return (x * 10 ** (10 * torch.rand(rows, 1, generator=g) - 5)).to(dtype)


def restored(x):
    codes, scales = quantize_rows(x)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    return codes.double() * scales[:, None].double()


def dequantized_logits(hidden, head, count):
    """In float64: the product of the rounded, and for the head's `count` strongest columns also what rounding took."""
    columns = head.double().square().sum(0).argsort(descending=True)[:count]
    a, b = restored(hidden), restored(head)

    def lacking(x, rounded):
        scales = quantize_rows(x)[1][:, None].double()
        return ((x.double() - rounded)[:, columns] / scales).to(torch.float8_e4m3fn).double() * scales

    return a @ b.T + a[:, columns] @ lacking(head, b).T + lacking(hidden, a) @ b[:, columns].T


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_element_is_the_nearest_of_its_row(dtype):
    x = wide_rows(dtype)
    codes, scales = quantize_rows(x)
    scaled = x.double() / scales[:, None].double()
    peak = scaled.abs().amax(-1)
    assert ((peak >= 128) & (peak < 256)).all() and (scales.frexp().mantissa == 0.5).all()  # powers of two
    distance = (scaled[..., None] - e4m3_values()).abs().amin(-1)
    assert torch.equal((codes.double() - scaled).abs(), distance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_an_element(dtype):
    x = wide_rows(dtype).double()
    error, peak = (restored(x.to(dtype)) - x).abs(), x.abs().amax(-1, keepdim=True)
    normal = x.abs() >= peak * 2.0**-13
    assert (error <= x.abs() * 2.0**-4)[normal].all() and (error <= peak * 2.0**-17).masked_fill(normal, True).all()
    assert (error / x.abs())[normal].max() > 0.05 and not normal.all()  # the bound is near, and both kinds occur


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_e4m3_holds_is_kept_at_every_scale(dtype):
    held = e4m3_values()
    held = held[held.abs() < 256]
    for exponent in (-60, -9, 0, 1, 40):
        row = (held * 2.0**exponent).to(dtype)[None]
        assert torch.equal(restored(row)[0], held * 2.0**exponent)


def test_zero_tiny_and_huge_rows():
    x = torch.tensor([0.0, 1e-44, 1e-30, 3e38, 1.0])[:, None] * torch.tensor([1.0, -0.5, 0.25, 0.0] * 4)
    codes, scales = quantize_rows(x)
    assert scales.isfinite().all() and (scales > 0).all() and codes.float().isfinite().all()
    assert (restored(x)[0] == 0).all()
    for row in (2, 3, 4):
        assert torch.allclose(restored(x)[row], x[row].double(), rtol=2.0**-4, atol=0)
    head = Fp8Head.of(x)
    assert (head.logits(torch.zeros(2, 16)) == 0).all()
    huge = head.logits(torch.full((1, 16), 1e30))[0]  # 3e38 * 1e30 is no float32
    assert huge[3].isinf() and huge[4].isfinite() and huge[0] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(bad, dtype):
    g = torch.Generator().manual_seed(0)
    hidden, table = torch.randn(4, 32, generator=g).to(dtype), torch.randn(20, 32, generator=g).to(dtype)
    hidden[2, 5] = bad
    logits = Fp8Head.of(table).logits(hidden)
    assert logits[2].isnan().all() and logits[[0, 1, 3]].isfinite().all()
    table[7, 0] = bad
    logits = Fp8Head.of(table).logits(hidden[:2])
    assert logits[:, 7].isnan().all() and logits[:, :7].isfinite().all() and logits[:, 8:].isfinite().all()
    loss = chunked_head_loss(hidden, table, labels=torch.arange(4), head_fp8=Fp8Head.of(table)).row_loss
    assert loss.sum().isnan()


def realistic(seed, rows=96, hidden=256, vocab=2003):  # 2003 is no multiple of 16
    """Unit hidden states and a head that gives logits of spread 2, as a trained model's."""
    g = torch.Generator().manual_seed(seed)
    states = [torch.randn(rows, hidden, generator=g) for _ in range(2)]
    return *states, torch.randn(vocab, hidden, generator=g) * 0.125, torch.randint(0, vocab, (rows,), generator=g)


def dense(logits, labels, teacher_logits):
    """Row losses of float64 logits, and their gradient."""
    x = logits.double().detach().requires_grad_()
    if teacher_logits is None:
        rows = F.cross_entropy(x, labels, reduction="none")
    else:
        log_t = teacher_logits.double().log_softmax(-1)
        rows = (log_t.exp() * (log_t - x.log_softmax(-1))).sum(-1)
    return rows.detach(), torch.autograd.grad(rows.sum(), x)[0]


@pytest.mark.parametrize("soft", [False, True])
def test_loss_is_that_of_the_quantized_logits_and_the_gradient_takes_the_real_head(soft):
    """The product in float64 from dequantized rows is what float32 accumulation must give: 1e-5 is its rounding."""
    hidden, teacher, table, labels = realistic(1)
    logits, teacher_logits = dequantized_logits(hidden, table, 64), dequantized_logits(teacher, table, 64) if soft else None
    rows, slope = dense(logits, labels, teacher_logits)
    leaf, scale = hidden.clone().requires_grad_(), torch.rand(96)
    kind = {"teacher_hidden": teacher} if soft else {"labels": labels}
    got = chunked_head_loss(leaf, table, chunk_rows=40, head_fp8=Fp8Head.of(table), **kind)
    (got.row_loss * scale).sum().backward()
    torch.testing.assert_close(got.row_loss.detach().double(), rows, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(leaf.grad.double(), (slope * scale[:, None]) @ table.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(got.prediction, logits.argmax(-1))
    wrong = (slope * scale[:, None]) @ restored(table)  # the quantized head in the gradient would be seen
    assert (leaf.grad - wrong).norm() / wrong.norm() > 0.01


@pytest.mark.parametrize("soft", [False, True])
def test_loss_and_gradient_near_the_unquantized_ones(soft):
    """Logits of spread 2 get noise of 2 * NOISE = 0.07, less what 64 corrected columns of 256 make good: 0.06. A row's loss
    moves by about sqrt(2) of that (the label's or teacher's side against the softmax's), the mean of 96 rows by 0.01. In
    the gradient, softmax entries move by 6%: with a hard label only they do, and they are the small part beside the label;
    with a soft one both sides move, of a difference."""
    hidden, teacher, table, labels = realistic(2)
    logits = hidden.double() @ table.double().T
    rows, slope = dense(logits, labels, teacher.double() @ table.double().T if soft else None)
    head = Fp8Head.of(table)
    error = head.logits(hidden).double() - logits
    assert error.std() / logits.std() == pytest.approx(NOISE * math.sqrt(1 - 64 / 256), rel=0.1)
    leaf = hidden.clone().requires_grad_()
    kind = {"teacher_hidden": teacher} if soft else {"labels": labels}
    got = chunked_head_loss(leaf, table, chunk_rows=40, head_fp8=head, **kind)
    got.row_loss.mean().backward()
    row_loss = got.row_loss.detach()
    assert 0 < abs(float(row_loss.mean()) - float(rows.mean())) < 3 * 0.01
    assert 0.02 < float((row_loss - rows).std()) < 2 * 0.1
    grad = slope @ table.double() / 96
    off = float((leaf.grad - grad).norm() / grad.norm())
    assert (0.02 if soft else 0.002) < off < (0.12 if soft else 0.03)


def test_padding_rows_never_win():
    hidden = torch.ones(3, 16)
    table = -torch.ones(19, 16) - torch.arange(19)[:, None] / 8  # every logit is below a padding row's 0
    head = Fp8Head.of(table)
    assert head.width == 32 and head.logits(hidden).shape == (3, 19)
    got = chunked_head_loss(hidden, table, labels=torch.zeros(3, dtype=torch.int64), head_fp8=head)
    wanted = F.cross_entropy(hidden.double() @ restored(table).T, torch.zeros(3, dtype=torch.int64), reduction="none")
    assert (got.prediction == 0).all()
    torch.testing.assert_close(got.row_loss.double(), wanted)


def test_head_in_pieces(monkeypatch):
    _, _, table, _ = realistic(4)
    whole = Fp8Head.of(table)
    monkeypatch.setattr(fp8_head, "_PIECE_ROWS", 100)
    pieces = Fp8Head.of(table)
    assert torch.equal(pieces.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(pieces.scales, whole.scales) and torch.equal(pieces.columns, whole.columns)
    states = torch.randn(5, 256)
    torch.testing.assert_close(pieces.logits(states), whole.logits(states))
    assert fp8_head.memory_bytes(*table.shape) == 2016 * (256 + 128 + 4) + 512
    assert fp8_head.memory_bytes(*table.shape) == sum(t.nbytes for t in (whole.codes, whole.scales, whole.columns))


def test_columns_that_carry_the_logits_are_corrected():
    """As in real heads: 8 of 256 columns have 20 times the others' size, here and in the states. They carry nearly all of
    every logit, and 0.036 of it would be lost in them; corrected, 2^-4 of that remains, and the rest's own 0.036."""
    hidden, _, table, _ = realistic(6)
    strong = torch.arange(3, 256, 32)
    hidden[:, strong] *= 20
    table[:, strong] *= 20
    head = Fp8Head.of(table)
    assert set(strong.tolist()) <= set(head.columns.tolist()) and len(head.columns) == 64
    exact = hidden.double() @ table.double().T
    error = (head.logits(hidden).double() - exact).std()
    plain = (restored(hidden) @ restored(table).T - exact).std()
    assert plain / exact.std() == pytest.approx(NOISE, rel=0.15)
    assert error < plain / 12 and error > 0.5 * 0.036 * math.sqrt(192) * 0.125


def test_count_of_corrected_columns():
    assert [fp8_head.corrected_columns(h) for h in (16, 32, 64, 240, 256, 576, 5120)] == [0, 8, 16, 56, 64, 64, 64]


# -- in a drafter ------------------------------------------------------------------------------------------------------

TINY = replace(TINY_STEP, vocab=90)


def drafter_with(precision, **options):
    torch.manual_seed(0)
    return make_drafter(
        TINY,
        make_head(TINY, CPU, torch.float32),
        CPU,
        torch.float32,
        attention_backend="sdpa",
        head_precision=precision,
        **options,
    )


@pytest.mark.parametrize("soft", [False, True])
def test_a_training_step_with_each_precision(soft):
    inputs = make_inputs(TINY, CPU, torch.float32).arguments
    losses, norms = [], []
    for precision in fp8_head.PRECISIONS:
        drafter = drafter_with(precision)
        loss, _ = drafter(**inputs, use_soft_labels=soft)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert 0 < abs(losses[1] / losses[0] - 1) < 0.05
    assert F.cosine_similarity(norms[0], norms[1], 0) > 0.98


def test_the_quantized_head_is_no_weight_and_no_checkpoint():
    same, fp8 = drafter_with("same"), drafter_with("fp8")
    assert same.head_fp8 is None and same.head_codes.numel() == 0
    assert same.state_dict().keys() == fp8.state_dict().keys()
    assert [n for n, _ in same.named_parameters()] == [n for n, _ in fp8.named_parameters()]
    torch.testing.assert_close(
        restored(fp8.lm_head).float(), fp8.head_fp8.codes[:90, :32].float() * fp8.head_fp8.scales[:90, None], rtol=0, atol=0
    )
    context = torch.randn(1, 5, 64)
    drafts = []
    for drafter in (same, fp8):  # decoding keeps the head's own dtype
        empty = drafter.new_context()
        drafter.extend(empty, context)
        drafts.append(drafter.propose(empty, 3))
    assert torch.equal(*drafts)


def test_the_quantized_head_survives_casts_and_is_shared_by_replicas():
    drafter = drafter_with("fp8")
    before = drafter.head_fp8
    twin = copy_module(drafter, CPU)
    assert twin.head_codes.data_ptr() == drafter.head_codes.data_ptr()
    assert twin.head_scale_bits.data_ptr() == drafter.head_scale_bits.data_ptr()
    assert twin.fc.weight.data_ptr() != drafter.fc.weight.data_ptr()
    drafter.to(torch.bfloat16)
    assert drafter.lm_head.dtype == torch.bfloat16
    assert torch.equal(drafter.head_fp8.codes.float(), before.codes.float())
    assert torch.equal(drafter.head_fp8.scales, before.scales)
    assert drafter.head_fp8.columns.dtype == torch.int64 and len(before.columns) == 8


def test_a_draft_vocabulary_quantizes_its_rows_alone():
    config = create_drafter_config(
        num_draft_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=90,
        draft_vocab_size=21,
    )
    drafter = DFlashDrafter(config, [0], 4, 4, 89, head_precision="fp8")
    table, ids = torch.randn(90, 32), torch.arange(0, 84, 4)
    drafter.load_target_head(table, table, ids)
    assert drafter.head_fp8.size == 21 and drafter.head_fp8.width == 32
    assert torch.equal(drafter.head_fp8.codes[:21, :32].float(), quantize_rows(table[ids])[0].float())


def test_a_run_passes_its_setting_on(tmp_path):
    target = tiny_target(vocab_size=270)
    save_material(tmp_path, target.model, chat_tokenizer())
    for precision in fp8_head.PRECISIONS:
        config = RunConfig.from_parameters(
            target=str(tmp_path / "target"),
            head_precision=precision,
            target_layers=[0, 2],
            gpus="cpu",
            dtype="float32",
            draft_vocab=None,
        )
        drafter = drafter_of_a_run(resolve(config), target, types.SimpleNamespace(conversations=[], mask_token_id=60), CPU)
        assert drafter.head_precision == precision and (drafter.head_fp8 is None) == (precision == "same")


def test_memory_of_a_run():
    target = tiny_target()
    need = {}
    for precision in fp8_head.PRECISIONS:
        config = RunConfig.from_parameters(gpus="cpu", num_captured=2, dtype="float32", head_precision=precision)
        topology = decide(config.runtime, 0)
        need[precision] = estimate(config, create_drafter_config(target.config, 2), target.config, topology)[CPU]
    assert need["fp8"].parts["float8 head"] == 64 * (32 + 2 * 8 + 4) + 8 * 8  # 61 rows rounded up, 8 columns corrected
    assert need["fp8"].need - need["same"].need == 64 * 53


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of the compute capability that is set; its product is never tried."""
    fp8_head._gpu_obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield lambda major, minor: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    fp8_head._gpu_obstacle.cache_clear()


def test_refusals_say_what_was_got_and_what_to_do(gpu, monkeypatch):
    with pytest.raises(ConfigError, match="multiple of 16, the target's is 40; set head_precision=same"):
        fp8_head.refuse(CPU, torch.float32, 40)
    with pytest.raises(ConfigError, match="computes in float32; set dtype=bfloat16 or head_precision=same"):
        fp8_head.refuse(CUDA, torch.float32, 64)
    with pytest.raises(ConfigError, match="mps is no NVIDIA GPU; set head_precision=same"):
        fp8_head.refuse(torch.device("mps"), torch.bfloat16, 64)
    gpu(8, 0)
    with pytest.raises(ConfigError, match="compute capability 8.0, float8 products need 8.9 or newer; set"):
        fp8_head.refuse(CUDA, torch.bfloat16, 64)
    assert not fp8_head.usable("cuda:0") and fp8_head.usable("cpu")


def test_a_product_that_fails_or_lies_is_refused(gpu, monkeypatch):
    gpu(9, 0)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **options: ones(*size, **options))  # on the CPU

    def broken(self, hidden, out=None):
        raise RuntimeError("no kernel image\nstack of C++")

    monkeypatch.setattr(Fp8Head, "logits", broken)
    with pytest.raises(ConfigError, match=r"refuses the product \(no kernel image\); set head_precision=same"):
        fp8_head.refuse(CUDA, torch.bfloat16, 64)
    fp8_head._gpu_obstacle.cache_clear()
    monkeypatch.setattr(Fp8Head, "logits", lambda self, hidden, out=None: hidden[:, :48] * 63)
    with pytest.raises(ConfigError, match="gives a wrong product"):
        fp8_head.refuse(CUDA, torch.bfloat16, 64)
    fp8_head._gpu_obstacle.cache_clear()
    monkeypatch.setattr(Fp8Head, "logits", lambda self, hidden, out=None: hidden[:, :48] * 64)
    fp8_head.refuse(CUDA, torch.bfloat16, 64)


def test_a_run_is_refused_before_its_data_is_read(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=40, num_attention_heads=4, vocab_size=270).save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"")  # never opened
    settings = dict(target=str(tmp_path / "target"), data="absent.jsonl")
    with pytest.raises(ConfigError, match="multiple of 16, the target's is 40"):
        start_run(RunConfig.from_parameters(**settings, gpus="cpu", head_precision="fp8"), root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    config = RunConfig.from_parameters(**settings, head_precision="fp8", dtype="float32")
    with pytest.raises(ConfigError, match="the target's is 40"):
        resolve(config, gpus=1, ask_gpus=False)
    assert (
        resolve(RunConfig.from_parameters(**settings), gpus=1, ask_gpus=False).dtype == torch.bfloat16
    )  # nothing asked for


def test_unknown_precisions_and_heads_are_refused_by_the_drafter():
    with pytest.raises(ConfigError, match="head_precision must be same or fp8, got 'int4'"):
        DFlashDrafter(TINY.config, [0], head_precision="int4", mask_token_id=1)
    with pytest.raises(ConfigError, match="head_precision must be same or fp8, got 'FP8'"):
        RunConfig.from_parameters(head_precision="FP8")
    config = create_drafter_config(
        num_draft_layers=1,
        hidden_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=48,
        vocab_size=90,
    )
    drafter = DFlashDrafter(config, [0], mask_token_id=1, head_precision="fp8")
    with pytest.raises(ConfigError, match="the target's is 24"):
        drafter.load_target_head(torch.zeros(90, 24), torch.zeros(90, 24))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_the_product_on_a_gpu(rows):
    """Against the CPU's: bfloat16 rounds logits to 2^-9, fast accumulation loses up to 1% of the running sum."""
    if not fp8_head.usable("cuda"):
        pytest.skip(fp8_head.obstacle("cuda"))
    hidden, _, table, _ = (t.bfloat16() if t.is_floating_point() else t for t in realistic(5, rows=rows, hidden=1024))
    wanted = Fp8Head.of(table).logits(hidden.float())
    head = Fp8Head.of(table.cuda())
    out = torch.full((rows, head.width), float("nan"), dtype=torch.bfloat16, device="cuda")
    got = head.logits(hidden.cuda(), out)
    assert got.data_ptr() == out.data_ptr() and math.isclose(float(out[:, head.size :].abs().max()), 0.0)
    assert (got.cpu().float() - wanted).abs().max() < 0.02 * wanted.abs().max()
