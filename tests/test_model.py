"""The drafter: who sees what, what is refused at the door, and a plain float64 reading of the same network."""

import math

import pytest
import torch

from dflash.drafter.config import DrafterConfig, create_drafter_config, rope_theta_of
from dflash.drafter.layers import rotary_tables
from dflash.drafter.masks import AnchorSet
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.warm_start import warm_start
from dflash.errors import ConfigError

V, H, N = 60, 32, 2
SMALL = DrafterConfig(
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=V,
    initializer_range=0.2,
)


def make_drafter(block_size=4, max_anchors=12, config=SMALL, seed=0, dtype=torch.float32, draft_ids=None, **options):
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config, [1, 3], block_size, max_anchors, V - 1, **options).to(dtype)
    drafter.load_target_head(torch.randn(V, H), torch.randn(V, H), draft_ids)
    return drafter


def make_pack(lengths=(9, 11), total=24, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(n) for n in (*lengths, total - sum(lengths))])
    loss_mask = torch.rand(total, generator=generator) > 0.3
    loss_mask[sum(lengths) :] = False
    return {
        "all_hidden_states": torch.randn(1, total, N * H, generator=generator, dtype=dtype),
        "verifier_last_hidden": torch.randn(1, total, H, generator=generator, dtype=dtype),
        "input_ids": torch.randint(0, V - 1, (1, total), generator=generator),
        "loss_mask": loss_mask[None],
        "lengths": torch.tensor(lengths),
        "position_ids": positions[None],
    }


def every_anchor(*positions):
    return AnchorSet(torch.tensor(positions), torch.ones(len(positions), dtype=torch.bool))


def hidden_of(drafter, pack, anchors):
    tensors = pack["all_hidden_states"], pack["input_ids"][0], pack["position_ids"][0]
    return drafter.draft(*drafter.pack_inputs(*tensors, anchors, pack["lengths"]))


def test_default_config_is_the_27b_drafter():
    c = create_drafter_config()
    assert (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (
        5120,
        5,
        32,
        8,
        128,
    )
    assert (c.intermediate_size, c.vocab_size, c.rope_theta) == (17408, 248320, 1e7)
    with torch.device("meta"):
        drafter = DFlashDrafter(
            config=create_drafter_config(num_draft_layers=5),
            target_layer_ids=[1, 16, 31, 46, 61],
            block_size=32,
            max_anchors=1024,
            mask_token_id=248070,
        )
    assert sum(p.numel() for p in drafter.parameters()) == c.parameter_count(5) == pytest.approx(1.73e9, rel=0.02)


@pytest.mark.parametrize("backend", ["sdpa", "sdpa_chunked"])
def test_overlapping_anchors_see_only_their_own_past(backend):
    """Anchors closer than a block: features at and after an anchor change nothing, the one before it does."""
    drafter, pack = make_drafter(attention_backend=backend), make_pack()
    anchors = every_anchor(3, 4, 6, 10, 13)
    before = hidden_of(drafter, pack, anchors)
    for block, anchor in enumerate(anchors.positions.tolist()):
        start = 0 if anchor < 9 else 9
        later = {**pack, "all_hidden_states": pack["all_hidden_states"].clone()}
        later["all_hidden_states"][:, anchor:] += 5
        assert torch.equal(hidden_of(drafter, later, anchors)[block], before[block])
        earlier = {**pack, "all_hidden_states": pack["all_hidden_states"].clone()}
        earlier["all_hidden_states"][:, anchor - 1] += 5
        changed = (hidden_of(drafter, earlier, anchors)[block] - before[block]).abs().amax(-1)
        assert (changed > 1e-4).all(), f"slots of the block at {anchor} (document from {start}) ignore their past"


def test_documents_do_not_see_each_other():
    drafter, pack = make_drafter(), make_pack()
    pack["loss_mask"][:, 9] = True  # the second document opens with a supervised token
    anchors = every_anchor(7, 8, 9, 12)
    before = hidden_of(drafter, pack, anchors)
    for changed, blocks in ((slice(0, 9), [2, 3]), (slice(9, 20), [0, 1])):
        other = {**pack, "all_hidden_states": pack["all_hidden_states"].clone(), "input_ids": pack["input_ids"].clone()}
        other["all_hidden_states"][:, changed] += 3
        other["input_ids"][:, changed] = (other["input_ids"][:, changed] + 1) % (V - 1)
        after = hidden_of(drafter, other, anchors)
        assert torch.equal(after[blocks], before[blocks])
    _, metrics = drafter(**pack, anchors=every_anchor(8))
    assert metrics["supervised_slots"] == 0, "slots past the document's end must weigh nothing"


def test_gradient_of_a_masked_position_is_exactly_zero():
    drafter, pack = make_drafter(), make_pack()
    pack["all_hidden_states"].requires_grad_()
    anchors = every_anchor(4, 12)
    loss, _ = drafter(**pack, anchors=anchors)
    (grad,) = torch.autograd.grad(loss, pack["all_hidden_states"])
    size = grad[0].abs().amax(-1)
    seen = torch.zeros(24, dtype=torch.bool)
    seen[:4], seen[9:12] = True, True
    assert (size[~seen] == 0).all() and (size[seen] > 0).all()


def reference(drafter, pack, anchor, gamma):
    """One block in float64, as loops: rows of hidden states and the weighted loss, from DESIGN's words."""
    c = drafter.config
    w = {n: p.detach().double() for n, p in drafter.named_parameters()}

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[name + ".weight"]

    def rotate(x, position):
        out = x.clone()
        for i in range(c.head_dim // 2):
            angle = position * c.rope_theta ** (-2 * i / c.head_dim)
            a, b = x[i], x[i + c.head_dim // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + c.head_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    ids, positions = pack["input_ids"][0].tolist(), pack["position_ids"][0].tolist()
    start = max(s for s in (0, 9) if s <= anchor)
    context = norm(pack["all_hidden_states"][0, start:anchor].double() @ w["fc.weight"].T, "hidden_norm")
    tokens = [ids[anchor]] + [drafter.mask_token_id] * (drafter.block_size - 1)
    x = torch.stack([drafter.embed_tokens[t].double() for t in tokens])
    for i in range(c.num_hidden_layers):
        p = f"layers.{i}."
        y = norm(x, p + "input_layernorm")
        rows = torch.cat([context, y])
        at = positions[start:anchor] + [positions[anchor] + k for k in range(drafter.block_size)]
        out = torch.zeros(len(y), c.num_attention_heads, c.head_dim, dtype=torch.float64)
        for head in range(c.num_attention_heads):
            kv = head * c.num_key_value_heads // c.num_attention_heads
            part = slice(head * c.head_dim, (head + 1) * c.head_dim)
            kv_part = slice(kv * c.head_dim, (kv + 1) * c.head_dim)
            q = norm(y @ w[p + "self_attn.q_proj.weight"].T[:, part], p + "self_attn.q_norm")
            k = norm(rows @ w[p + "self_attn.k_proj.weight"].T[:, kv_part], p + "self_attn.k_norm")
            v = rows @ w[p + "self_attn.v_proj.weight"].T[:, kv_part]
            q = torch.stack([rotate(row, positions[anchor] + j) for j, row in enumerate(q)])
            k = torch.stack([rotate(row, at[j]) for j, row in enumerate(k)])
            out[:, head] = (q @ k.T / math.sqrt(c.head_dim)).softmax(-1) @ v
        x = x + out.flatten(1) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(x, p + "post_attention_layernorm")
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[p + "mlp.down_proj.weight"].T
    x = norm(x, "norm")
    end = 9 if start == 0 else 20
    total = weight = 0.0
    for k in range(1, drafter.block_size):
        if anchor + k < end and pack["loss_mask"][0, anchor + k]:
            log_p = (x[k] @ drafter.lm_head.double().T).log_softmax(-1)
            total -= math.exp(-(k - 1) / gamma) * float(log_p[ids[anchor + k]])
            weight += math.exp(-(k - 1) / gamma)
    return x, total, weight


def test_forward_equals_a_plain_float64_reading():
    drafter, pack = make_drafter(), make_pack()
    anchors = every_anchor(0, 3, 5, 12)
    hidden = hidden_of(drafter, pack, anchors)
    totals = weights = 0.0
    for i, anchor in enumerate(anchors.positions.tolist()):
        wanted, total, weight = reference(drafter, pack, anchor, gamma=3.0)
        torch.testing.assert_close(hidden[i].double(), wanted, rtol=1e-4, atol=1e-4)
        totals, weights = totals + total, weights + weight
    loss, _ = drafter(**pack, anchors=anchors, gamma=3.0)
    assert float(loss) == pytest.approx(totals / weights, rel=1e-4)


def test_soft_labels_are_the_targets_distribution_one_position_earlier():
    drafter, pack = make_drafter(), make_pack()
    anchors = every_anchor(3, 12)
    hidden = hidden_of(drafter, pack, anchors).double()
    total = weight = 0.0
    for i, (anchor, end) in enumerate(((3, 9), (12, 20))):
        for k in range(1, 4):
            if anchor + k < end and pack["loss_mask"][0, anchor + k]:
                head = drafter.lm_head.double()
                teacher = (pack["verifier_last_hidden"][0, anchor + k - 1].double() @ head.T).log_softmax(-1)
                draft = (hidden[i, k] @ head.T).log_softmax(-1)
                w = math.exp(-(k - 1) / 5)
                total += w * float((teacher.exp() * (teacher - draft)).sum())
                weight += w
    loss, _ = drafter(**pack, anchors=anchors, use_soft_labels=True, gamma=5.0)
    assert float(loss) == pytest.approx(total / weight, rel=1e-4)


def test_draft_vocabulary_leaves_out_unknown_labels():
    ids = torch.arange(0, V, 2)
    config = DrafterConfig(**{**SMALL.to_dict(), "draft_vocab_size": len(ids)})
    drafter, pack = make_drafter(config=config, draft_ids=ids), make_pack()
    loss, metrics = drafter(**pack, anchors=every_anchor(2, 3, 10, 11), gamma=None)
    known = metrics["weight"]
    assert 0 < known < metrics["supervised_slots"]
    assert torch.isfinite(loss)
    odd = {**pack, "input_ids": pack["input_ids"] // 2 * 2 + 1}
    loss, metrics = drafter(**odd, anchors=every_anchor(2, 3), gamma=None)
    assert loss == 0 and metrics["correct_by_slot"].sum() == 0
    with pytest.raises(ConfigError, match="30 distinct ids below 60"):
        drafter.load_target_head(torch.randn(V, H), torch.randn(V, H), torch.arange(29))


def test_padding_anchors_and_position_zero_change_no_gradient():
    pack = make_pack()
    pack["loss_mask"][:, :3] = True
    grads = []
    for anchors in (every_anchor(0, 5), AnchorSet(torch.tensor([0, 5, 0, 0]), torch.tensor([True, True, False, False]))):
        drafter = make_drafter()
        drafter(**pack, anchors=anchors)[0].backward()
        grads.append({n: p.grad for n, p in drafter.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.isfinite(grad).all(), name
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6)


def test_no_supervised_slot_gives_exactly_zero():
    drafter, pack = make_drafter(), make_pack()
    pack["loss_mask"][:] = False
    loss, metrics = drafter(**pack)
    loss.backward()
    assert loss == 0 and metrics["blocks"] == 0
    assert all((p.grad is None) or (p.grad == 0).all() for p in drafter.parameters())


@pytest.mark.parametrize("reduction", ["weight_mean", "token_mean"])
@pytest.mark.parametrize("gamma", [None, 0, 1.0, 10.0])
def test_a_constant_loss_is_reported_whatever_gamma_mask_and_blocks(gamma, reduction):
    """speculators#720: dividing by the token count makes gamma change the learning rate in effect."""
    drafter = make_drafter()
    drafter.lm_head.zero_()  # every token equally likely: each slot's loss is log V
    for seed, anchors in ((1, every_anchor(3)), (2, every_anchor(0, 2, 3, 10, 13)), (3, None)):
        pack = make_pack(seed=seed)
        pack["loss_mask"][:, [4, 14]] = True
        loss, metrics = drafter(**pack, anchors=anchors, gamma=gamma, reduction=reduction)
        share = 1.0
        if reduction == "token_mean":  # documented: over the number of weighted slots, so gamma does scale it
            slots = metrics["supervised_by_slot"] if gamma != 0 else metrics["supervised_by_slot"][:1]
            share = float(metrics["weight"]) / float(slots.sum())
        assert float(loss.detach()) == pytest.approx(math.log(V) * share, rel=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_first_loss_is_near_log_vocabulary(layers, seed):
    config = DrafterConfig(**{**SMALL.to_dict(), "num_hidden_layers": layers, "initializer_range": 0.02})
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config, [1, 3], 4, 12, V - 1)
    drafter.load_target_head(torch.randn(V, H) * 0.02, torch.randn(V, H) * 0.02)
    loss, _ = drafter(**make_pack(seed=seed))
    assert float(loss) == pytest.approx(math.log(V), rel=0.05)
    for name, p in drafter.named_parameters():
        assert p.std() > 0.01 if p.dim() > 1 else (p == 1).all(), name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("all_hidden_states", lambda x: x.view(1, 24, N, H), r"\[1, 24, 2, 32\], wanted \[1, T, 64\].*torch.cat.*dim=-1"),
        ("all_hidden_states", lambda x: x[:, :, :-1], r"all_hidden_states has shape \[1, 24, 63\], wanted \[1, 24, 64\]"),
        ("all_hidden_states", lambda x: x[:, :-1], r"\[1, 23, 64\], wanted \[1, 24, 64\]"),
        ("verifier_last_hidden", lambda x: x[..., :5], r"verifier_last_hidden has shape .*wanted \[1, 24, 32\]"),
        ("input_ids", lambda x: x[0], r"input_ids has shape \[24\], wanted \[1, T\]"),
        ("loss_mask", lambda x: x[:, :3], r"loss_mask has shape \[1, 3\], wanted \[1, 24\]"),
        ("loss_mask", lambda x: x.float(), r"loss_mask has dtype torch.float32, wanted torch.bool"),
        ("position_ids", lambda x: x[0], r"position_ids has shape \[24\]"),
        ("lengths", lambda x: x + 5, r"sum to at most T = 24, got 30"),
        ("lengths", lambda x: x[:0], r"lengths has shape \[0\]"),
    ],
)
def test_wrong_inputs_are_refused_by_name(name, change, message):
    drafter, pack = make_drafter(), make_pack()
    with pytest.raises(ValueError, match=message):
        drafter(**{**pack, name: change(pack[name])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"max_anchors": 0}, "max_anchors must be at least 1"),
        ({"mask_token_id": V}, "mask_token_id 60 lies outside the vocabulary of 60"),
        ({"target_layer_ids": [1, 1]}, "distinct layer ids"),
        ({"target_layer_ids": []}, "distinct layer ids"),
    ],
)
def test_bad_settings_are_refused(options, message):
    settings = {"target_layer_ids": [1], "block_size": 4, "max_anchors": 2, "mask_token_id": 3, **options}
    with pytest.raises(ConfigError, match=message):
        DFlashDrafter(SMALL, **settings)


def test_a_target_of_another_size_is_refused():
    drafter = DFlashDrafter(SMALL, [1], 4, 2, 3)
    with pytest.raises(ConfigError, match=r"embed_tokens is \[60, 31\], the drafter wants \[60, 32\]"):
        drafter.load_target_head(torch.randn(V, 31), torch.randn(V, 31))
    with pytest.raises(ConfigError, match="call load_target_head"):
        drafter(**{**make_pack(), "all_hidden_states": torch.randn(1, 24, H)})


def test_drafting_from_a_grown_context_equals_training():
    """Decoding appends features piece by piece; its logits are those of the training mask at the same anchor."""
    drafter, pack = make_drafter(), make_pack(lengths=(20,), total=20)
    hidden = hidden_of(drafter, pack, every_anchor(6, 13))
    context = drafter.new_context()
    for upto, block in ((6, 0), (13, 1)):
        drafter.extend(context, pack["all_hidden_states"][:, context.length : upto])
        logits = drafter.propose(context, int(pack["input_ids"][0, upto]))
        torch.testing.assert_close(logits, hidden[block, 1:] @ drafter.lm_head.T, rtol=1e-4, atol=1e-4)


def test_rope_theta_is_read_in_both_layouts():
    class Old:
        rope_theta = 5e6

    class New:
        rope_parameters = {"rope_theta": 5e6, "rope_type": "default"}

    class PerLayerType:
        rope_parameters = {"full_attention": {"rope_theta": 5e6}, "sliding_attention": {"rope_theta": 1e4}}

    thetas = [rope_theta_of(c()) for c in (Old, New, PerLayerType)]
    assert thetas == [5e6] * 3
    tables = [rotary_tables(torch.arange(5), 8, theta) for theta in thetas]
    assert all(torch.equal(t[0], tables[0][0]) for t in tables)


def test_warm_start_reproduces_the_targets_keys_and_values():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=H,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=V,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )
    model = Qwen3ForCausalLM(config).eval()
    for p in model.parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5)
    drafter = DFlashDrafter(create_drafter_config(config, 2), [0, 2], 4, 4, V - 1)
    said = warm_start(drafter, model.model)
    assert said == "warm start: target layers 3, 4 copied, each gives the target's own output"
    x = torch.randn(1, 6, H)
    features = torch.cat([torch.randn(1, 6, H), x], -1)
    source = model.model.layers[3]
    rotary = rotary_tables(torch.arange(6), 8, 1e4)
    k, v = drafter.layers[0].self_attn.keys_values(drafter.hidden_norm(drafter.fc(features)), rotary)
    entry = source.input_layernorm(x)
    heads = source.self_attn.k_proj(entry).unflatten(-1, (2, 8)).transpose(1, 2)
    wanted_k = source.self_attn.k_norm(heads)
    wanted_v = source.self_attn.v_proj(entry).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(v, wanted_v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k[:, :, 0], wanted_k[:, :, 0], rtol=1e-4, atol=1e-5)  # position 0 is not rotated
    with pytest.raises(ConfigError, match="needs 2 target layers, the target has 1"):
        model.model.layers = model.model.layers[:1]
        warm_start(drafter, model.model)
