"""DFlash 2: convolution, selector, their loss and their start, against loops and dense float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_model import SMALL, V, every_anchor, hidden_of, make_drafter, make_pack

from dflash.drafter.config import DrafterConfig
from dflash.drafter.convolution import LocalConvolution
from dflash.drafter.export import drafter_layout
from dflash.drafter.layouts import settings_in_layout, zlab_config
from dflash.drafter.losses import GROUP, chunked_head_loss, top_of_rows
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import load_drafter, save_drafter, with_parts
from dflash.errors import ConfigError
from dflash.train.settings import RunConfig
from dflash.train.step import metric_sums, read_sums

PARTS = {"drafter_kind": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
SECOND = replace(SMALL, **PARTS)
KINDS = {
    "both": SECOND,
    "convolution": replace(SECOND, selector_top_k=0),
    "selector": replace(SECOND, conv_kernel_size=0),
    "low rank": replace(SECOND, selector_codebooks="low_rank"),
}


def stirred(config=SECOND, seed=5, **options):
    """Every weight of the two parts away from its start."""
    drafter = make_drafter(config=config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "conv" in name or "selector" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return drafter


def same_tables(drafter, other):
    drafter.load_target_head(other.embed_tokens, other.lm_head)


# -- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_as_plain_dflash(kind):
    plain, drafter, pack = make_drafter(), make_drafter(config=KINDS[kind]), make_pack()
    own = dict(drafter.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in plain.named_parameters())  # the seed's same draws
    same_tables(drafter, plain)
    anchors = every_anchor(3, 4, 6, 10, 13)
    assert torch.equal(hidden_of(drafter, pack, anchors), hidden_of(plain, pack, anchors))
    loss, metrics = drafter(**pack, anchors=anchors)
    wanted, plain_metrics = plain(**pack, anchors=anchors)
    assert (loss - metrics.get("selector_loss", 0)).item() == pytest.approx(wanted.item(), rel=1e-6)
    for name in ("correct_by_slot", "accepted_by_slot", "blocks"):
        assert torch.equal(metrics[name], plain_metrics[name])
    context = drafter.new_context()
    drafter.extend(context, pack["all_hidden_states"][:, :9])
    proposal = drafter.propose(context, 3)
    best = proposal.best() if drafter.config.has_selector else proposal.argmax(-1)
    assert torch.equal(best, plain.propose(context, 3).argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted(kind):
    drafter = make_drafter(config=KINDS[kind])
    assert sum(p.numel() for p in drafter.parameters()) == KINDS[kind].parameter_count(2)


# -- convolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_by_loops(taps):
    h, group, block, blocks = 12, 3, 4, 2
    torch.manual_seed(taps)
    part = LocalConvolution(h, taps, group, block).double()
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter)
    x, z = torch.randn(2, 1, blocks * block, h, dtype=torch.float64).unbind()
    entered, leaving = part.enter(x)
    left = part.leave(z, leaving)
    d = (x[0] @ part.kernel_projection.weight.T).view(-1, 2, taps, h // group)
    for side, (got, source) in enumerate(((entered, x), (left, z))):
        for t in range(blocks * block):
            for c in range(h):
                wanted = sum(
                    (part.base_kernel[side, k, c] + d[t, side, k, c // group]) * source[0, t - k, c]
                    for k in range(taps)
                    if t % block >= k
                )
                assert got[0, t, c].item() == pytest.approx(wanted.item(), abs=1e-12)


def test_slots_see_only_earlier_slots_of_their_block_through_the_convolution():
    """With attention's output silenced, what reaches slot t of a block comes from slots before it alone."""
    drafter, pack = stirred(KINDS["convolution"]), make_pack()
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
    anchors = every_anchor(3, 10)
    before = hidden_of(drafter, pack, anchors)
    pack["input_ids"][0, 10] = (pack["input_ids"][0, 10] + 1) % (V - 1)  # slot 0 of the second block
    changed = (hidden_of(drafter, pack, anchors) - before).abs().amax(-1)
    assert (changed[0] == 0).all() and (changed[1, :3] > 1e-4).all()  # two layers of two convolutions of two taps


# -- candidates and loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [50, 16 * GROUP, 17 * GROUP + 5])
def test_top_of_rows(vocab):
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    values, ids = top_of_rows(logits, 4)
    wanted = logits.topk(4)
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)


def dense_loss(drafter, hidden, before, tokens, scale, missing):
    """The selector's loss and picks from whole logits, row by row."""
    selector = drafter.candidate_selector
    logits, losses, right, recalled = hidden @ drafter.lm_head.T, [], [], []
    a_table, b_table = selector.codebooks(drafter.embed_tokens)
    for h, row, a, token in zip(hidden, logits, before.tolist(), tokens.tolist(), strict=True):
        rows = row.topk(drafter.config.selector_top_k).indices.tolist()
        wanted = int(drafter.draft_index[token])
        recalled.append(wanted in rows)
        if not recalled[-1] and wanted >= 0:
            rows[-1] = wanted
        ids = drafter.draft_token_ids[rows]
        pair = (a_table[a] * (selector.hidden_projection.weight @ h) * b_table[ids]).sum(-1)
        scores = row[rows] + pair
        if wanted < 0 or (missing == "skip" and not recalled[-1]):
            losses.append(scores.sum() * 0)
        else:
            losses.append(F.cross_entropy(scores[None], torch.tensor([rows.index(wanted)])))
        right.append(recalled[-1] and int(ids[scores.argmax()]) == token)
    return (torch.stack(losses) * scale).sum(), right, recalled


@pytest.mark.parametrize("missing", ["replace", "skip"])
@pytest.mark.parametrize(
    "soft, kind, ids", [(False, "both", None), (True, "low rank", None), (True, "selector", range(0, V, 2))]
)
def test_selector_loss_equals_dense_float64(missing, soft, kind, ids):
    config, alpha = replace(KINDS[kind], selector_top_k=20), 0.6
    draft_ids = None if ids is None else torch.tensor(list(ids))
    config = config if ids is None else replace(config, draft_vocab_size=len(draft_ids))
    drafter = stirred(config, dtype=torch.float64, draft_ids=draft_ids, loss_chunk_rows=5)
    pack, anchors = make_pack(dtype=torch.float64), every_anchor(2, 3, 5, 10, 12, 15)
    common = dict(**pack, anchors=anchors, use_soft_labels=soft, gamma=3.0, selector_missing=missing)
    loss, metrics = drafter(**common, selector_alpha=alpha)
    base, _ = drafter(**common, selector_alpha=0.0)
    hidden = hidden_of(drafter, pack, anchors)
    rows, before, tokens, weights = [], [], [], []
    for block, anchor in enumerate(anchors.positions.tolist()):
        end = 9 if anchor < 9 else 20
        for slot in range(1, 4):
            at = anchor + slot
            if at < end and pack["loss_mask"][0, at]:
                token = int(pack["input_ids"][0, at])
                known = soft or int(drafter.draft_index[token]) >= 0
                rows.append(hidden[block, slot])
                before.append(int(pack["input_ids"][0, at - 1]))
                tokens.append(token)
                weights.append(float(torch.exp(torch.tensor(-(slot - 1) / 3.0))) * known)
    scale = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    wanted, right, recalled = dense_loss(
        drafter, torch.stack(rows), torch.tensor(before), torch.tensor(tokens), scale, missing
    )
    assert float(metrics["selector_loss"]) == pytest.approx(wanted.item(), rel=1e-6)
    assert int(metrics["correct_by_slot"].sum()) == sum(right)
    assert int(metrics["recalled_by_slot"].sum()) == sum(recalled) < len(recalled) and any(recalled)
    named = dict(drafter.named_parameters())
    exact = torch.autograd.grad(alpha * wanted, named.values(), allow_unused=True, retain_graph=True)
    ours = torch.autograd.grad(loss, named.values(), retain_graph=True)
    plain = torch.autograd.grad(base, named.values(), allow_unused=True)
    for name, got, without, want in zip(named, ours, plain, exact, strict=True):
        want = torch.zeros_like(got) if want is None else want
        without = torch.zeros_like(got) if without is None else without
        torch.testing.assert_close(got - without, want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)
    assert float(exact[0].abs().max()) > 1e-4  # it reaches the backbone


def test_no_wanted_token_leaves_the_candidates_alone():
    hidden, head = torch.randn(6, 8), torch.randn(40, 8)
    got = chunked_head_loss(hidden, head, labels=torch.arange(6), wanted=torch.full((6,), -1), top_k=3, chunk_rows=4)
    assert torch.equal(got.ids, (hidden @ head.T).topk(3).indices) and not got.recalled.any()


def test_a_teacher_forced_run_is_the_walks_run():
    """What training counts as accepted is what the walk drafts, and the record tells which part works."""
    drafter, pack = stirred(), make_pack()
    anchors = every_anchor(2, 3, 5, 10, 12, 15)
    with torch.no_grad():
        _, metrics = drafter(**pack, anchors=anchors)
        hidden = hidden_of(drafter, pack, anchors)
    accepted = [0, 0, 0]
    for block, anchor in enumerate(anchors.positions.tolist()):
        path = drafter.proposal(hidden[block, 1:], int(pack["input_ids"][0, anchor])).best().tolist()
        end = 9 if anchor < 9 else 20
        for slot, token in enumerate(path, 1):
            at = anchor + slot
            if at >= end or not pack["loss_mask"][0, at] or int(pack["input_ids"][0, at]) != token:
                break
            accepted[slot - 1] += 1
    assert metrics["accepted_by_slot"].tolist() == accepted
    read = read_sums(metric_sums(metrics).tolist())
    assert read["argmax_length"] <= read["oracle_length"] and len(read["recall_by_slot"]) == 3
    plain = read_sums(metric_sums(make_drafter()(**pack, anchors=anchors)[1]).tolist())
    assert "selector_loss" not in plain and "oracle_length" not in plain


# -- on disk, and from one kind to the other --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_storage_round_trip_and_parts_added(tmp_path, kind):
    drafter = stirred(KINDS[kind])
    save_drafter(drafter, tmp_path / "second", "t")
    again = load_drafter(tmp_path / "second")
    assert again.config == drafter.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    plain, pack, anchors = make_drafter(), make_pack(), every_anchor(3, 10)
    parts = [name for name in RunConfig.from_parameters("cpu").drafter.shape() if name != "sliding_window"]
    grown = with_parts(plain, plain.config.extended(None, **{name: getattr(KINDS[kind], name) for name in parts}))
    assert grown.config == KINDS[kind] and isinstance(grown, DFlashDrafter)
    assert torch.equal(hidden_of(grown, pack, anchors), hidden_of(plain, pack, anchors))


def test_a_part_is_neither_dropped_nor_changed():
    for asked, message in (
        (
            {"drafter_kind": "dflash"},
            "of the other kind than asked for: it has a convolution, made with drafter_kind=dflash2",
        ),
        (PARTS | {"selector_rank": 7}, "it has a selector.*selector_rank=6"),
        (PARTS | {"conv_group_size": 4}, "conv_group_size=8"),
    ):
        with pytest.raises(ConfigError, match=message):
            SECOND.extended(None, **asked)
    assert SECOND.extended(None, **(PARTS | {"selector_top_k": 3})).selector_top_k == 3
    with pytest.raises(ConfigError, match=r"sliding_window asks for \(4, 4\), this drafter was made with None"):
        SECOND.extended((4, 4), **PARTS)


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path):
    save_drafter(stirred(), tmp_path / "second", "t")
    save_drafter(make_drafter(), tmp_path / "plain", "t")
    (tmp_path / "plain" / "drafter.safetensors").rename(tmp_path / "second" / "drafter.safetensors")
    with pytest.raises(ConfigError, match=r"missing \['candidate_selector"):
        load_drafter(tmp_path / "second")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"selector_top_k": V + 1}, f"selector_top_k {V + 1} is more than the {V} tokens"),
        ({"selector_top_k": 9, "draft_vocab_size": 8}, "more than the 8 tokens that the drafter may propose"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide the hidden size 32"),
        ({"conv_kernel_size": 0, "selector_top_k": 0}, "which is plain DFlash"),
        ({"selector_codebooks": "sparse"}, "selector_codebooks must be full or low_rank, got 'sparse'"),
        ({"drafter_kind": "dflash3"}, "drafter_kind must be dflash or dflash2, got 'dflash3'"),
        ({"selector_rank": 0}, "selector_rank must be a whole number of at least 1, got 0"),
        ({"conv_kernel_size": 2.5}, "conv_kernel_size must be a whole number"),
    ],
)
def test_bad_shapes(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SECOND, **changes)


def test_a_kernel_above_the_block_is_refused():
    with pytest.raises(ConfigError, match="conv_kernel_size 5 is more than the 4 slots of a block"):
        make_drafter(config=replace(SECOND, conv_kernel_size=5))
    with pytest.raises(ConfigError, match="conv_kernel_size 9 is more than the 8 slots of a block"):
        RunConfig.from_parameters(drafter_kind="dflash2", block_size=8, conv_kernel_size=9)


@pytest.mark.parametrize(
    "given, wanted", [("", None), (2048, (2048, 2048)), ("2048", (2048, 2048)), ([0, 64], (None, 64)), (0, None)]
)
def test_sliding_windows_of_a_run(given, wanted):
    assert RunConfig.from_parameters(sliding_window=given).drafter.shape()["sliding_window"] == wanted


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": [1, 2, 3]}, "one number of tokens, or one for each of 2 layers"),
        ({"selector_missing": "drop"}, "selector_missing must be replace or skip, got 'drop'"),
        ({"selector_alpha": -1}, "selector_alpha must be finite and at least 0"),
        ({"drafter_kind": "2"}, "drafter_kind must be dflash or dflash2"),
        ({"selector_top_k": -1}, "selector_top_k must be at least 0, got -1"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_parameters(**changes)


def published(tmp_path, **changes):
    save_drafter(make_drafter(config=SECOND), tmp_path / "d", "t")
    config = zlab_config(drafter_layout(tmp_path / "d"), "float32", 4)
    config["dflash_config"] |= changes
    config["dflash_config"] = {name: value for name, value in config["dflash_config"].items() if value != "gone"}
    return config


def test_published_config(tmp_path):
    config = published(tmp_path)
    assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["selector_top_k"] == 5
    layout, settings, limits = settings_in_layout(config)
    assert layout == "zlab" and not limits and DrafterConfig.from_dict(settings["config"]) == SECOND
    _, _, limits = settings_in_layout(published(tmp_path / "b", output_multiplier=2.0, tree_width=3))
    assert "it applies output_multiplier = 2.0" in limits
    assert "its dflash_config asks for tree_width = 3, which this package does not know" in limits
    with pytest.raises(ConfigError, match="dflash_config lacks selector_rank"):
        settings_in_layout(published(tmp_path / "c", selector_rank="gone"))
    plain = published(tmp_path / "d") | {"architectures": ["DFlashDraftModel"]}
    with pytest.raises(ConfigError, match="dflash_config has conv_kernel_size.*wanted DFlash2DraftModel"):
        settings_in_layout(plain)
