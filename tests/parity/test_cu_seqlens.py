"""Sample bounds: what the published segmented path accepts gives its numbers; everything else is refused (T7)."""

import pytest
import torch

from lumina_ft.errors import DataError

ACCEPTED = ("valid", "valid_int32", "valid_full_length", "float_values")
REFUSED = {
    "start_not_zero": "must start at 0",
    "start_negative": "must start at 0",
    "zero_length_segment": "must increase strictly",
    "decreasing": "must increase strictly",
    "beyond_length": "the row has",
    "all_zero": "must increase strictly",
    "single_entry": "at least one sample",
    "empty": "at least one sample",
    "two_dimensional": "shape",
    "two_rows": "shape",
    "python_list": "must be a tensor",
    "none": "missing",
}


def bounds(golden, name):
    for case in golden.info("cu_seqlens")["cases"]:
        if case["name"] == name:
            value = case["cu_seqlens"]
            if value is None or name == "python_list":
                return value
            integer = torch.int32 if name == "valid_int32" else torch.int64
            return torch.tensor(value, dtype=torch.float32 if name == "float_values" else integer)
    raise KeyError(name)


def test_every_golden_case_has_a_test(golden):
    assert {case["name"] for case in golden.info("cu_seqlens")["cases"]} == {*ACCEPTED, *REFUSED}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize(("kernels", "attention"), [("torch", "segmented"), ("eager", "dense")])
def test_accepted_bounds_match(golden, assert_close, name, kernels, attention):
    inputs = golden.inputs("cu_seqlens") | {"cu_seqlens": bounds(golden, name)}
    out = golden.model(kernels)(**inputs)
    assert out.attention == attention
    rows = inputs["valid"].flatten().bool()
    assert_close(out.hidden[rows], golden.tensors("cu_seqlens")[f"{name}.dense_hidden"][0, rows])


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kernels", ["auto", "torch", "eager"])
def test_surprises_5_6_other_bounds_are_refused_everywhere(golden, name, kernels):
    inputs = golden.inputs("cu_seqlens") | {"cu_seqlens": bounds(golden, name)}
    with pytest.raises(DataError, match=REFUSED[name]):
        golden.model(kernels)(**inputs)


def test_surprise_7_a_valid_tail_is_refused(golden, assert_close):
    """There, the last sample reads the tail on the dense path and doesn't on the segmented path, both silently."""
    inputs, stored = golden.inputs("cu_seqlens", "valid_tail."), golden.tensors("cu_seqlens")
    inputs = golden.inputs("cu_seqlens", "valid_tail.in.")
    with pytest.raises(DataError, match="marked valid"):
        golden.model()(**inputs)
    end = int(inputs["cu_seqlens"][-1])
    valid = inputs["valid"].clone()
    valid[:, end:] = 0
    got = golden.model()(**inputs | {"valid": valid}).hidden
    assert_close(got[:end], stored["valid_tail.segmented_hidden"][0, :end])
    joined = inputs["cu_seqlens"].clone()
    joined[-1] = valid.shape[1]
    got = golden.model()(**inputs | {"cu_seqlens": joined}).hidden
    assert_close(got, stored["valid_tail.dense_hidden"][0])


def test_t7_strict_mode_names_its_trigger(golden):
    inputs = {k: v for k, v in golden.inputs("cu_seqlens").items() if k in ("input_ids", "type_ids", "position_ids")}
    tokens = inputs["type_ids"].shape[1]
    with pytest.raises(DataError, match="cu_seqlens — missing — model.kernels=torch needs sample bounds"):
        golden.model("torch")(**inputs)
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    with pytest.raises(DataError, match="allowed — an explicit mask — model.kernels=torch serves the packing rule"):
        golden.model("torch")(**inputs, allowed=mask)
    for kernels in ("auto", "eager"):
        assert golden.model(kernels)(**inputs, allowed=mask).attention == "dense"
    assert golden.model("auto")(**inputs).attention == "segmented"
    assert golden.model("eager")(**inputs).attention == "dense"
