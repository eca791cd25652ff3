"""Against the installed speculators package: same weights and anchors, same logits, loss and gradients."""

import types

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from tiny_models import VOCAB, random_drafter, tiny_target

from dflash.drafter.export import export_drafter
from dflash.drafter.masks import AnchorSet, document_ids

pytest.importorskip("speculators", reason="the speculators package is not installed")
dflash_core = pytest.importorskip("speculators.models.dflash.core", reason="speculators does not import here")

IDS = [50, 7, 3, 21, 33, 12, 44, 9, 31, 58]
BLOCK = 4


def their_model(folder, target_folder=None):
    """The package's own loader; eager attention and losses, so that it runs on a CPU."""
    model = dflash_core.DFlashDraftModel.from_pretrained(folder, verifier=target_folder, dtype=torch.float32)
    inner = model.config.transformer_layer_config
    inner._attn_implementation = model._attn_impl = "eager"
    mask = dflash_core.create_float_mask
    model._create_mask_fn = lambda *args, **kwargs: mask(*args, **kwargs, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("speculators")
    target = tiny_target()
    target.model.save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    return types.SimpleNamespace(root=root, target=target, name=str(root / "target"))


def make(place, layout, **options):
    drafter = random_drafter(place.target, BLOCK, **options)
    folder = place.root / f"{layout}-{len(list(place.root.iterdir()))}"
    export_drafter(drafter, folder, layout, place.name, num_target_layers=4, architectures=["LlamaForCausalLM"])
    return drafter, their_model(folder, place.name if layout == "zlab" else None)


def pack(target):
    """Two documents and padding; T 40 tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (40,), generator=generator)
    lengths = torch.tensor([19, 17])
    mask = torch.zeros(40, dtype=torch.bool)
    mask[5:19] = mask[23:36] = True
    positions = torch.cat([torch.arange(19), torch.arange(17), torch.arange(4)])
    anchors = AnchorSet(torch.tensor([5, 6, 9, 14, 24, 25, 30, 32, 0]), torch.tensor([True] * 8 + [False]))
    return ids, mask, positions, lengths, anchors, target.capture(ids[None], lengths)


def both(place, layout, monkeypatch, loss_name, **options):
    from speculators.losses import eager

    ours, theirs = make(place, layout, **options)
    ids, mask, positions, lengths, anchors, features = pack(place.target)
    monkeypatch.setattr(dflash_core, "select_anchors", lambda *_: (anchors.positions, anchors.valid))
    documents = document_ids(lengths, 40)[None]
    # The final-normed states go in on our side; there, the package norms them itself.
    raw = {}
    hook = place.target.decoder.norm.register_forward_pre_hook(lambda module, args: raw.update(x=args[0]))
    last = torch.zeros_like(features.verifier_last_hidden)
    begin = 0
    for size in lengths.tolist():
        place.target.capture(ids[None, begin : begin + size])
        last[:, begin : begin + size] = raw["x"]
        begin += size
    hook.remove()
    common = dict(
        hidden_states=features.all_hidden_states,
        input_ids=ids[None],
        loss_mask=mask[None],
        verifier_last_hidden_states=last,
        document_ids=documents,
        position_ids=positions[None],
    )
    hidden, logits, targets, _, _ = theirs._backbone_forward(**common, max_anchors=9)
    _, loss, _ = theirs(**common, max_anchors=9, gamma=3.0, loss_config={loss_name: (getattr(eager, loss_name), 1.0)})
    return types.SimpleNamespace(
        ours=ours,
        theirs=theirs,
        logits=logits[0].unflatten(0, (9, BLOCK)),
        targets=targets[0],
        loss=loss,
        ids=ids,
        mask=mask,
        positions=positions,
        lengths=lengths,
        anchors=anchors,
        features=features,
    )


CASES = [
    ("speculators", {}),
    ("zlab", {}),
    ("speculators", {"draft_ids": IDS}),
    ("speculators", {"sliding_window": (5, None)}),
    ("speculators", {"rope_theta": 5e6}),
]


@pytest.mark.parametrize("layout, options", CASES)
def test_same_weights_give_the_same_logits(place, monkeypatch, layout, options):
    case = both(place, layout, monkeypatch, "kl_div_loss", **options)
    with torch.no_grad():
        tensors = case.features.all_hidden_states, case.ids, case.positions
        hidden = case.ours.draft(*case.ours.pack_inputs(*tensors, case.anchors, case.lengths))
    order = case.ours.draft_token_ids.argsort()
    ours = (hidden @ case.ours.lm_head.T)[..., order]
    torch.testing.assert_close(ours[:8], case.logits[:8].detach(), atol=1e-5, rtol=1e-5)
    assert float(ours.std()) > 0.1


@pytest.mark.parametrize("layout, options", CASES)
def test_same_loss_and_gradients(place, monkeypatch, layout, options):
    """Soft labels; `token_mean` is what that package divides by."""
    case = both(place, layout, monkeypatch, "kl_div_loss", **options)
    loss, _ = case.ours(
        all_hidden_states=case.features.all_hidden_states,
        verifier_last_hidden=case.features.verifier_last_hidden,
        input_ids=case.ids[None],
        loss_mask=case.mask[None],
        lengths=case.lengths,
        position_ids=case.positions[None],
        use_soft_labels=True,
        gamma=3.0,
        reduction="token_mean",
        anchors=case.anchors,
    )
    torch.testing.assert_close(loss, case.loss, atol=1e-5, rtol=1e-5)
    assert float(loss) > 0.1
    loss.backward()
    case.loss.backward()
    theirs = dict(case.theirs.named_parameters())
    compared = 0
    for name, parameter in case.ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)
        compared += float(parameter.grad.abs().max()) > 0
    assert compared == len(list(case.ours.named_parameters()))


def test_both_exports_are_read_alike(place):
    """Case 16: the package turns z-lab ids into its own by adding one; our two exports agree with it."""
    drafter = random_drafter(place.target, BLOCK)
    models = {}
    for layout in ("zlab", "speculators"):
        folder = place.root / f"alike-{layout}"
        export_drafter(drafter, folder, layout, place.name, num_target_layers=4, architectures=["LlamaForCausalLM"])
        models[layout] = their_model(folder, place.name if layout == "zlab" else None)
    assert models["zlab"].target_layer_ids == models["speculators"].target_layer_ids == [1, 3]
    for name, value in drafter.state_dict().items():
        for model in models.values():
            assert torch.equal(model.state_dict()[name], value), name
    for model in models.values():
        assert torch.equal(model.lm_head.weight, place.target.head_weight)
        assert torch.equal(model.embed_tokens.weight, place.target.embed_weight)
        assert model.config.block_size == BLOCK and model.mask_token_id == drafter.mask_token_id


def test_nothing_missing_or_unexpected(place):
    for options in ({}, {"draft_ids": IDS}):
        drafter = random_drafter(place.target, BLOCK, **options)
        folder = place.root / f"whole-{len(options)}"
        export_drafter(drafter, folder, "speculators", place.name, num_target_layers=4)
        model = their_model(folder)
        assert not any(value.isnan().any() for value in model.state_dict().values() if value.is_floating_point())
        if options:
            assert (torch.arange(len(IDS)) + model.d2t).tolist() == sorted(IDS)
            assert torch.equal(model.lm_head.weight, place.target.head_weight[sorted(IDS)])
