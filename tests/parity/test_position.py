"""Parity of rotary positions and of 1-D packed inputs (T8)."""

import pytest
import torch

from lumina_ft.errors import DataError
from lumina_ft.models.attention import rotary_tables

VALUES = ("valid", "position_ids", "type_ids", "turn_ids", "is_clean", "block_ids")


def run(golden, inputs):
    out = golden.model()(**inputs)
    assert out.attention == "segmented"
    return out.hidden


def test_rotary_tables_match(golden):
    stored, config = golden.tensors("position"), golden.model().config
    positions = golden.inputs("position")["position_ids"][0]
    got = rotary_tables(positions, rotary_dim=config.rotary_dim, theta=config.rope_theta, dtype=torch.float32)
    for ours, name in ((got.cos, "rotary.cos"), (got.sin, "rotary.sin")):
        torch.testing.assert_close(torch.cat((ours, ours), -1).squeeze(1), stored[name][0], rtol=0, atol=1e-6)
    one = rotary_tables(torch.tensor([1]), rotary_dim=config.rotary_dim, theta=config.rope_theta, dtype=torch.float32)
    torch.testing.assert_close(one.sin.flatten().asin(), stored["rotary.inv_freq"], rtol=1e-6, atol=1e-7)


def test_hidden_states_match(golden, assert_close):
    inputs = golden.inputs("position")
    rows = inputs["valid"].flatten().bool()
    assert_close(run(golden, inputs)[rows], golden.tensors("position")["hidden_states"][0, rows])


def test_shifted_positions_match(golden, assert_close):
    inputs = golden.inputs("position")
    rows = inputs["valid"].flatten().bool()
    inputs["position_ids"] = inputs["position_ids"] + 11
    got = run(golden, inputs)
    assert_close(got[rows], golden.tensors("position")["shifted_positions.hidden_states"][0, rows])


@pytest.mark.parametrize("names", [*((name,) for name in VALUES), VALUES], ids=lambda names: "+".join(names))
def test_t8_one_dimensional_inputs_equal_two_dimensional(golden, names):
    inputs = golden.inputs("position")
    flat = {k: v.flatten() if k in names else v for k, v in inputs.items()}
    assert torch.equal(run(golden, inputs), run(golden, flat))


def test_t8_packed_ids_without_a_batch_axis(golden):
    inputs = golden.inputs("position")
    flat = {k: v if k == "cu_seqlens" else v[0] for k, v in inputs.items()}
    assert torch.equal(run(golden, inputs), run(golden, flat))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.uint8])
def test_masks_of_other_dtypes_equal_integers(golden, dtype):
    inputs = golden.inputs("position")
    assert torch.equal(run(golden, inputs), run(golden, inputs | {"valid": inputs["valid"].to(dtype)}))


def test_surprise_11_short_positions_are_refused(golden, assert_close):
    """The published code fills missing positions with 0, 1, 2, …; spelled out, that reproduces its result."""
    inputs = golden.inputs("position")
    tokens = inputs["position_ids"].shape[1]
    short = inputs["position_ids"][:, :-6]
    with pytest.raises(DataError, match=f"position_ids .* got {tokens - 6} values for {tokens} tokens"):
        run(golden, inputs | {"position_ids": short})
    filled = torch.cat((short, torch.arange(6).unsqueeze(0)), dim=1)
    rows = inputs["valid"].flatten().bool()
    got = run(golden, inputs | {"position_ids": filled})
    assert_close(got[rows], golden.tensors("position")["short_positions.hidden_states"][0, rows])


def test_t8_long_and_per_codebook_values_are_refused(golden):
    inputs = golden.inputs("position")
    long = torch.cat((inputs["position_ids"], inputs["position_ids"][:, :4]), dim=1)
    with pytest.raises(DataError, match="position_ids — shape"):
        run(golden, inputs | {"position_ids": long})
    for name in ("position_ids", "valid"):
        with pytest.raises(DataError, match=f"{name} — shape"):
            run(golden, inputs | {name: inputs[name].unsqueeze(-1).expand_as(inputs["input_ids"])})
