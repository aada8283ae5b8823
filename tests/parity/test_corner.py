"""Corner cases of labels and outputs: reproduced, or refused where the published code misbehaves (T1-T3)."""

import pytest
import torch

from lumina_ft.errors import DataError

REPRODUCED = (
    "no_image",
    "no_text",
    "all_ignored",
    "labels_SC",
    "labels_BS_text_only",
    "labels_BS_image_ignored",
    "float_labels",
    "text_label_only_codebook0_counts",
)
REFUSED = {
    "labels_BS_with_image_labels": "no codebook axis",
    "partial_ignored_codebook": "only some codebooks",
    "image_label_beyond_embedding_rows": "code out of range",
    "image_label_beyond_head_classes": "code out of range",
    "negative_text_label": "id out of range",
    "labels_BS_with_S_equal_C": "could mean",
}
ATTENTION = {"torch": "segmented", "eager": "dense"}
KERNELS = pytest.mark.parametrize("kernels", [*ATTENTION])


def run(golden, name, kernels="torch", **changes):
    model = golden.model(kernels).train()
    out = model(**golden.inputs("corner", f"{name}.in.") | changes, return_logits=True)
    assert out.attention == ATTENTION[kernels]
    return out


def expect_refused(golden, name):
    with pytest.raises(DataError, match=REFUSED[name]) as error:
        run(golden, name)
    return str(error.value)


def test_every_golden_case_has_a_test(golden):
    assert {case["name"] for case in golden.info("corner")["cases"]} == {*REPRODUCED, *REFUSED}


@KERNELS
@pytest.mark.parametrize("name", REPRODUCED)
def test_logits_match(golden, assert_close, name, kernels):
    stored = golden.tensors("corner")
    out = run(golden, name, kernels)
    assert_close(out.logits_text, stored[f"{name}.logits_text"])
    assert_close(out.logits_image, stored[f"{name}.logits_img"])
    assert int(out.losses["text"].count) == stored[f"{name}.logits_text"].shape[0]
    assert int(out.losses["image"].count) == stored[f"{name}.logits_img"].shape[:2].numel()


def test_t3_labels_without_a_batch_axis_equal_those_with_one(golden):
    labels = golden.inputs("corner", "labels_SC.in.")["labels"]
    flat, batched = run(golden, "labels_SC"), run(golden, "labels_SC", labels=labels.unsqueeze(0))
    assert torch.equal(flat.logits_image, batched.logits_image)
    assert torch.equal(flat.logits_text, batched.logits_text)


def test_t2_float_labels_equal_integer_ones_and_half_types_are_refused(golden):
    labels = golden.inputs("corner", "float_labels.in.")["labels"]
    assert labels.dtype == torch.float32
    floats, integers = run(golden, "float_labels"), run(golden, "float_labels", labels=labels.long())
    assert torch.equal(floats.logits_image, integers.logits_image)
    for half in (torch.bfloat16, torch.float16):
        with pytest.raises(DataError, match=f"labels — {half}"):
            run(golden, "float_labels", labels=labels.to(half))
    with pytest.raises(DataError, match="labels .* not exact integers"):
        run(golden, "float_labels", labels=labels + 0.25)


def test_surprise_21_partial_labels_refused(golden):
    message = expect_refused(golden, "partial_ignored_codebook")
    assert "sample " in message and "position " in message


def test_surprise_21_negative_text_label_refused(golden):
    message = expect_refused(golden, "negative_text_label")
    assert "-5" in message and "sample 0" in message


def test_surprise_21_labels_beyond_the_head_classes_refused(golden):
    expect_refused(golden, "image_label_beyond_head_classes")


def test_image_label_beyond_the_table_refused(golden):
    expect_refused(golden, "image_label_beyond_embedding_rows")


def test_surprise_22_labels_without_codebook_axis_refused_with_images(golden):
    expect_refused(golden, "labels_BS_with_image_labels")


def test_surprise_22_ambiguous_labels_refused(golden):
    expect_refused(golden, "labels_BS_with_S_equal_C")


@pytest.mark.parametrize("name", ["no_image", "no_text", "all_ignored"])
def test_surprise_25_every_parameter_gets_a_gradient(golden, name):
    """There, a pack without images leaves whole modules without gradient unless a dummy term is added."""
    model = golden.model().train()
    out = model(**golden.inputs("corner", f"{name}.in."))
    sum(loss.total for loss in out.losses.values()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert missing == []
    if name != "no_text":
        assert not model.lm_img_head[0].weight.grad.any()
    if name != "no_image":
        assert not model.lm_head.weight.grad.any()


@pytest.mark.parametrize(("name", "module"), [("no_image", "multi_codebook_head"), ("no_text", "lm_head")])
def test_surprise_25_non_finite_weights_of_an_idle_module_show(golden, name, module):
    """A dummy term 0 * NaN would poison the loss without a trace; here the place is named."""
    model = golden.model().train()
    with torch.no_grad():
        next(model.get_submodule(module).parameters()).fill_(float("nan"))
    finite = model(**golden.inputs("corner", f"{name}.in.")).finite
    place = {"multi_codebook_head": "codebook_head", "lm_head": "logits.text"}[module]
    assert not finite[place] and finite["backbone"]


def test_labels_none_gives_logits_everywhere(golden, assert_close):
    inputs = golden.inputs("corner", "labels_SC.in.")
    del inputs["labels"]
    model = golden.model()
    out = model(**inputs)
    assert out.losses is None
    rows = inputs["valid"].flatten().bool()
    assert_close(model.text_logits(out.hidden[rows]), golden.tensors("corner")["labels_none.logits"][0, rows])


def test_decoding_outputs_match(golden, assert_close):
    stored = golden.tensors("corner")
    inputs = golden.inputs("corner", "labels_SC.in.")
    del inputs["labels"]
    types, clean = inputs["type_ids"].flatten(), inputs["is_clean"].flatten().bool()
    model = golden.model()
    hidden = model(**inputs).hidden
    assert_close(model.text_logits(hidden[(types == 3) & ~clean]), stored["infer_mmu.logits"])
    assert_close(hidden[types == 4], stored["infer_t2i.hidden"][0])
    del inputs["is_clean"]
    hidden = model(**inputs).hidden
    assert_close(model.text_logits(hidden[types == 3]), stored["infer_mmu_without_is_clean.logits"])


def plain_text(golden):
    ids = golden.tensors("corner")["plain_text_2d.input_ids"]
    return {"input_ids": ids, "type_ids": torch.ones_like(ids)}


def test_plain_text_ids_match(golden, assert_close):
    model = golden.model("auto")
    got = model.text_logits(model(**plain_text(golden)).hidden)
    assert_close(got, golden.tensors("corner")["plain_text_2d.logits"][0])


def test_surprise_4_one_masked_key_does_not_make_text_causal(golden, assert_close):
    stored = golden.tensors("corner")["plain_text_2d_one_masked.logits"][0]
    inputs = plain_text(golden)
    tokens = inputs["input_ids"].shape[1]
    valid = torch.ones(tokens, dtype=torch.bool)
    valid[-1] = False
    model = golden.model("auto")
    ours = model.text_logits(model(**inputs, valid=valid).hidden)
    shorter = {k: v[:, :-1] for k, v in inputs.items()}
    assert_close(ours[:-1], model.text_logits(model(**shorter).hidden))
    assert (ours[:-1] - stored[:-1]).abs().max() > 1.0
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    causal[:, -1] = False
    asked = model.text_logits(model(**inputs, allowed=causal).hidden)
    assert_close(asked[:-1], stored[:-1])


def test_surprise_2_media_without_codebooks_refused(golden):
    inputs = plain_text(golden)
    inputs["type_ids"] = inputs["type_ids"].clone()
    inputs["type_ids"][0, 3] = 2
    with pytest.raises(DataError, match="one column at sample 0, position 3"):
        golden.model("auto")(**inputs)
