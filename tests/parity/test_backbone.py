"""Parity of embeddings, decoder layers and final hidden states on valid rows (T6-T8)."""

import pytest
import torch

ATTENTION = {"torch": "segmented", "eager": "dense"}
KERNELS = pytest.mark.parametrize("kernels", [*ATTENTION])


def valid_rows(inputs):
    return inputs["valid"].flatten().bool()


def test_input_embeddings_match(golden, assert_close):
    inputs, model = golden.inputs("backbone"), golden.model()
    got = model.embed(inputs["input_ids"][0], inputs["type_ids"][0])
    assert_close(got, golden.tensors("backbone")["inputs_embeds"][0])


@KERNELS
def test_hidden_states_match(golden, assert_close, kernels):
    inputs, stored = golden.inputs("backbone"), golden.tensors("backbone")
    out = golden.model(kernels)(**inputs)
    assert out.attention == ATTENTION[kernels]
    rows = valid_rows(inputs)
    assert_close(out.hidden[rows], stored["hidden_states"][0, rows])
    assert_close(out.hidden[rows], stored["hidden_states_segmented"][0, rows])


@KERNELS
def test_every_layer_matches(golden, assert_close, kernels):
    inputs, stored = golden.inputs("backbone"), golden.tensors("backbone")
    model = golden.model(kernels)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    model(**inputs)
    rows = valid_rows(inputs)
    assert len(seen) == model.config.num_hidden_layers
    for i, hidden in enumerate(seen):
        assert_close(hidden[rows], stored[f"layer_output.{i}"][0, rows])


@KERNELS
def test_surprise_11_default_positions_restart_per_sample_with_the_same_result(golden, assert_close, kernels):
    """The published default runs over the whole pack; rotary attention sees differences only, so nothing changes."""
    inputs, stored = golden.inputs("backbone"), golden.tensors("backbone")
    del inputs["position_ids"]
    out = golden.model(kernels)(**inputs)
    rows = valid_rows(inputs)
    assert out.attention == ATTENTION[kernels]
    assert_close(out.hidden[rows], stored["hidden_states_default_positions"][0, rows])


@KERNELS
def test_surprise_8_padding_inside_samples_is_silent(golden, assert_close, kernels):
    """Valid rows match; masked rows, which average over other keys there, get attention output 0 here."""
    stored = golden.tensors("backbone")
    inputs = golden.inputs("backbone") | golden.inputs("backbone", "inner_padding.")
    model = golden.model(kernels)
    outputs = []
    model.model.layers[0].attention.register_forward_hook(lambda module, args, out: outputs.append(out))
    out = model(**inputs)
    rows = valid_rows(inputs)
    assert out.attention == ATTENTION[kernels]
    assert_close(out.hidden[rows], stored["inner_padding.hidden_states"][0, rows])
    assert_close(out.hidden[rows], stored["inner_padding.hidden_states_segmented"][0, rows])
    assert (outputs[0][~rows] == 0).all()
    assert not torch.allclose(
        stored["inner_padding.hidden_states"][0, ~rows], stored["inner_padding.hidden_states_segmented"][0, ~rows]
    )


@KERNELS
def test_two_rows_sharing_bounds_match(golden, assert_close, kernels):
    inputs, stored = golden.inputs("backbone", "batch2."), golden.tensors("backbone")
    out = golden.model(kernels)(**inputs)
    rows = valid_rows(inputs)
    assert out.attention == ATTENTION[kernels]
    assert_close(out.hidden[rows], stored["batch2.hidden_states"].flatten(0, 1)[rows])


@KERNELS
def test_a_sample_in_a_pack_equals_the_sample_alone(golden, assert_close, kernels):
    inputs = golden.inputs("backbone")
    model = golden.model(kernels)
    packed = model(**inputs).hidden
    bounds = inputs["cu_seqlens"].tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        alone = {k: v[:, start:end] for k, v in inputs.items() if k != "cu_seqlens"}
        out = model(**alone, cu_seqlens=torch.tensor([0, end - start]))
        rows = valid_rows(alone)
        assert_close(packed[start:end][rows], out.hidden[rows])


def test_perturbing_a_sample_leaves_the_others_bitwise_alone(golden):
    inputs = golden.inputs("backbone")
    for kernels in ATTENTION:
        model = golden.model(kernels)
        before = model(**inputs).hidden
        changed = {k: v.clone() for k, v in inputs.items()}
        bounds = inputs["cu_seqlens"].tolist()
        text = torch.arange(bounds[1], bounds[2])
        text = text[(inputs["type_ids"][0, text] % 2) == 1]
        changed["input_ids"][0, text] = (changed["input_ids"][0, text] + 1) % 400
        after = model(**changed).hidden
        others = valid_rows(inputs).clone()
        others[bounds[1] : bounds[2]] = False
        assert not torch.equal(before[text], after[text])
        # Rows of other samples share matrix products with the changed ones, nothing else.
        torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
