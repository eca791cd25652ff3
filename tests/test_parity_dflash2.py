"""DFlash 2 against the installed speculators package: same weights and anchors, same logits, scores, loss, gradients."""

import types

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from test_acceptance import make_pack
from tiny_models import SECOND, random_drafter, tiny_target

from dflash.drafter.export import export_drafter, import_drafter
from dflash.drafter.masks import AnchorSet, document_ids
from dflash.drafter.selector import pair_scores

pytest.importorskip("speculators", reason="the speculators package is not installed")
core = pytest.importorskip("speculators.models.dflash2.core", reason="speculators does not import here")
first = pytest.importorskip("speculators.models.dflash.core")

BLOCK, ALPHA = 4, 0.7


def their_model(folder):
    model = core.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32)
    model.config.transformer_layer_config._attn_implementation = model._attn_impl = "eager"
    mask = first.create_float_mask
    model._create_mask_fn = lambda *args, **kwargs: mask(*args, **kwargs, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("dflash2")
    target = tiny_target()
    target.model.save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    return types.SimpleNamespace(root=root, target=target, name=str(root / "target"))


def export(place, drafter, layout):
    folder = place.root / f"{layout}-{len(list(place.root.iterdir()))}"
    export_drafter(drafter, folder, layout, place.name, num_target_layers=4, architectures=["LlamaForCausalLM"])
    return folder


def both(place, monkeypatch, **changes):
    """Their forward and ours on text that the target wrote greedily: there the text is the target's own choice."""
    from speculators.losses import eager

    target = place.target
    drafter = random_drafter(target, BLOCK, **(SECOND | changes))
    theirs = their_model(export(place, drafter, "speculators"))
    pack, _, source = make_pack(target)
    features, total = source.get(pack), len(pack.input_ids)
    anchors = AnchorSet(torch.tensor([4, 5, 9, 20, 35, 37, 50, 70, 0]), torch.tensor([True] * 8 + [False]))
    monkeypatch.setattr(first, "select_anchors", lambda *_: (anchors.positions, anchors.valid))
    raw, last, begin = {}, torch.zeros_like(features.verifier_last_hidden), 0
    hook = target.decoder.norm.register_forward_pre_hook(lambda module, args: raw.update(x=args[0]))
    for size in pack.lengths.tolist():  # there, the package norms the last states itself
        target.capture(pack.input_ids[None, begin : begin + size])
        last[:, begin : begin + size] = raw["x"]
        begin += size
    hook.remove()
    common = dict(
        hidden_states=features.all_hidden_states,
        input_ids=pack.input_ids[None],
        loss_mask=pack.loss_mask[None],
        verifier_last_hidden_states=last,
        document_ids=document_ids(pack.lengths, total)[None],
        position_ids=pack.position_ids[None],
        max_anchors=9,
    )
    hidden, logits, _, _, indices = theirs._backbone_forward(**common)
    _, loss, metrics = theirs(
        **common,
        gamma=3.0,
        selector_loss_alpha=ALPHA,
        loss_config={"kl_div_loss": (eager.kl_div_loss, 1.0)},
        tv_loss_fn=eager.tv_loss,
    )
    before = theirs._predecessor_ids(pack.input_ids[None], indices).reshape(1, -1)
    ids, scores = theirs.candidate_selector.select(logits, hidden, before)
    return types.SimpleNamespace(**vars(), ours=drafter)


@pytest.mark.parametrize("changes", [{}, {"selector_codebooks": "low_rank"}, {"conv_kernel_size": 3}])
def test_same_logits_and_candidate_scores(place, monkeypatch, changes):
    """The package itself reads no z-lab folder of DFlash 2."""
    case = both(place, monkeypatch, **changes)
    ours, pack = case.ours, case.pack
    tensors = case.features.all_hidden_states, pack.input_ids, pack.position_ids
    with torch.no_grad():
        hidden = ours.draft(*ours.pack_inputs(*tensors, case.anchors, pack.lengths)).flatten(0, 1)
        logits, selector = hidden @ ours.lm_head.T, ours.candidate_selector
        ids = case.ids[0]
        successors = selector.successors(ids.flatten(), ours.embed_tokens).unflatten(0, ids.shape)
        scores = pair_scores(logits.gather(1, ids), selector.contexts(hidden, case.before[0], ours.embed_tokens), successors)
    real = slice(0, 8 * BLOCK)
    torch.testing.assert_close(logits[real], case.logits[0, real].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores[real], case.scores[0, real].detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits[real].topk(5).indices, ids[real])
    assert float((scores - logits.gather(1, ids))[real].abs().max()) > 0.05  # the pairs count


def test_same_loss_metrics_and_gradients(place, monkeypatch):
    case = both(place, monkeypatch)
    pack = case.pack
    loss, metrics = case.ours(
        all_hidden_states=case.features.all_hidden_states,
        verifier_last_hidden=case.features.verifier_last_hidden,
        input_ids=pack.input_ids[None],
        loss_mask=pack.loss_mask[None],
        lengths=pack.lengths,
        position_ids=pack.position_ids[None],
        use_soft_labels=True,
        gamma=3.0,
        reduction="token_mean",
        anchors=case.anchors,
        selector_alpha=ALPHA,
    )
    torch.testing.assert_close(loss, case.loss, atol=1e-5, rtol=1e-5)
    assert float(metrics["selector_loss"]) > 0.1
    theirs = case.metrics
    assert float(metrics["recalled_by_slot"].sum()) == float(theirs["unary_candidate_recall_at_5_sum"])
    assert float(metrics["accepted"] + metrics["blocks"]) == float(theirs["eal_sum"])
    oracle = float(metrics["oracle_accepted_by_slot"].sum() + metrics["blocks"])
    assert oracle == float(theirs["unary_top_5_oracle_accepted_length_sum"])
    loss.backward()
    case.loss.backward()
    named = dict(case.theirs.named_parameters())
    for name, parameter in case.ours.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)
        assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize("layout", ["speculators", "zlab"])
def test_import_gives_the_same_drafter_back(place, layout):
    drafter = random_drafter(place.target, BLOCK, **SECOND)
    again = import_drafter(export(place, drafter, layout), place.target)
    assert again.config == drafter.config and again.block_size == BLOCK
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
