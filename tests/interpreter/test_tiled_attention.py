"""Tiled attention, interpreted: output and every gradient against float64, for every rule (T6, T7)."""

import pytest
import torch
from attention_cases import (
    RULES,
    attention_inputs,
    kernel,
    plan_and_mask,
    random_metadata,
    reference,
    starts_of,
    text_metadata,
)
from parity import assert_parity, outputs_and_gradients, sparse_zeros
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lumina_ft.kernels.attention.tile_plan import TilePlan, plan_bidirectional
from lumina_ft.kernels.attention.tiled import tiled_attention, tiled_unsupported_reason

TRAINED = ("q", "k", "v")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def check(rule, lengths, meta, *, heads=(4, 2), head_dim=16, dtype=torch.float32):
    sizes = {"head_dim": head_dim, "dtype": dtype, "heads_per_key": heads[0] // heads[1]}
    plan, mask = plan_and_mask(rule, lengths, meta, **sizes)
    inputs = attention_inputs(mask.shape[0], heads, head_dim, dtype)
    assert_parity(kernel(plan), reference(mask), inputs, TRAINED)


@BOTH
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_on_a_ragged_pack(rule, dtype):
    # A prime length, a single token, a sample of one tile; two tokens outside, three invalid.
    lengths = [37, 1, 16]
    check(rule, lengths, random_metadata(lengths, 2, invalid=3), dtype=dtype)


@BOTH
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        pytest.param((1, 1), 24, id="dim 24, padded to 32"),
        pytest.param((8, 2), 16, id="four heads in a tile"),
        pytest.param((6, 2), 16, id="three heads to a key, none share a tile"),
        pytest.param((2, 1), 80, id="dim 80, padded to 128"),
    ],
)
def test_heads_and_dims(heads, head_dim, dtype):
    check("blocks", [21, 12], random_metadata([21, 12], 0), heads=heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("heads", "head_dim"), [pytest.param((8, 2), 128, id="dim 128"), pytest.param((4, 2), 64, id="dim 64")]
)
def test_every_rule_at_first_class_dims(rule, heads, head_dim, dtype):
    lengths = [67, 3, 48]
    check(rule, lengths, random_metadata(lengths, 5, invalid=7, seed=3), heads=heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.slow
@BOTH
def test_a_text_sample_as_it_is_trained(dtype):
    check("blocks", [150], text_metadata(22, 64, 16), head_dim=64, dtype=dtype)


def test_float32_gradients_of_a_longer_text_sample_with_full_tiles():
    meta = text_metadata(35, 48, 16)
    plan, mask = plan_and_mask("blocks", [131], meta, head_dim=16, dtype=torch.float32, heads_per_key=1)
    full = int((plan.forward.programs[:, 3] - plan.forward.programs[:, 2]).sum())
    assert 0 < full < plan.forward.entries.shape[0]
    assert_parity(kernel(plan), reference(mask), attention_inputs(131, (1, 1), 16), TRAINED)


def test_t7_padding_gets_zero_and_sends_nothing_back_whatever_it_holds():
    lengths = [9, 20]
    meta = random_metadata(lengths, 5, invalid=4, seed=2)
    plan, _ = plan_and_mask("blocks", lengths, meta, head_dim=16, dtype=torch.float32, heads_per_key=2)
    inputs = attention_inputs(34, (2, 1), 16)
    valid = meta["valid"]
    upstream = torch.randn(34, 2, 16, generator=torch.Generator().manual_seed(3))
    want = outputs_and_gradients(kernel(plan), inputs, TRAINED, upstream)
    for tensor in (*inputs.values(), upstream):
        assert tensor is not None
        tensor[~valid] = float("nan")
    got = outputs_and_gradients(kernel(plan), inputs, TRAINED, upstream)
    for name, value in got.items():
        assert value is not None and want[name] is not None
        assert torch.equal(value[valid], want[name][valid]), name
        assert (value[~valid] == 0).all(), name


@pytest.mark.parametrize("lengths", [[11, 30], [30, 11]])
def test_t6_a_sample_has_the_same_bits_alone_and_beside_nan(lengths):
    inputs = attention_inputs(41, (2, 1), 16)
    upstream = torch.randn(41, 2, 16, generator=torch.Generator().manual_seed(3))
    first = lengths[0]

    def run(lengths, tensors, gradient):
        valid = torch.ones(sum(lengths), dtype=torch.bool)
        plan = plan_bidirectional(
            starts_of(lengths), lengths, valid=valid, head_dim=16, dtype=torch.float32, heads_per_key=2
        )
        return outputs_and_gradients(kernel(plan), tensors, TRAINED, gradient)

    alone = run(lengths[1:], {name: x[first:] for name, x in inputs.items()}, upstream[first:])
    for tensor in (*inputs.values(), upstream):
        tensor[:first] = float("nan")
    beside = run(lengths, inputs, upstream)
    for name, value in alone.items():
        assert torch.equal(beside[name][first:], value), name


def test_strided_values_are_read_in_place():
    plan, mask = plan_and_mask(
        "blocks", [19], random_metadata([19], 0), head_dim=16, dtype=torch.float32, heads_per_key=2
    )
    fused = torch.randn(19, 8, 16, generator=torch.Generator().manual_seed(0))

    def attend(attention):
        def run(fused: Tensor) -> Tensor:
            return attention(*fused.split((4, 2, 2), dim=1))

        return run

    assert_parity(attend(kernel(plan)), attend(reference(mask)), {"fused": fused}, ("fused",))


def test_rows_beyond_2_to_the_31_elements():
    lengths = [1, 1, 1]
    valid = torch.ones(3, dtype=torch.bool)
    far = [sparse_zeros((3, 2**30), torch.float32)[:, :16].unsqueeze(1) for _ in range(3)]
    near = attention_inputs(3, (1, 1), 16)
    for wide, x in zip(far, near.values(), strict=True):
        wide.copy_(x)
    plan = plan_bidirectional(starts_of(lengths), lengths, valid=valid, head_dim=16, dtype=torch.float32)
    with torch.no_grad():
        out = tiled_attention(*far, plan)
    # A token alone in its sample takes its own value.
    assert torch.equal(out, near["v"])


def small_case() -> tuple[TilePlan, list[Tensor]]:
    plan, _ = plan_and_mask(
        "blocks", [18, 5], random_metadata([18, 5], 1), head_dim=16, dtype=torch.float32, heads_per_key=2
    )
    inputs = attention_inputs(24, (2, 1), 16)
    return plan, [inputs[name].clone().requires_grad_() for name in TRAINED]


def test_the_operators_keep_their_promises_to_torch():
    plan, leaves = small_case()
    lists = [x for tiles in (plan.forward, plan.dq, plan.dkv) for x in (tiles.programs, tiles.entries)]
    forward = torch.ops.lumina_ft.tiled_attention.default
    torch.library.opcheck(forward, (*leaves, plan.meta, *lists, plan.pack))
    with torch.no_grad():
        q, k, v = (leaf.detach() for leaf in leaves)
        out, lse = forward(q, k, v, plan.meta, *lists, plan.pack)
        backward = torch.ops.lumina_ft.tiled_attention_backward.default
        grad = torch.randn_like(out)
        torch.library.opcheck(backward, (grad, q, k, v, out, lse, plan.meta, *lists[2:], plan.pack))


@pytest.mark.parametrize("wrapper", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_calls_have_the_same_bits(wrapper):
    plan, leaves = small_case()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tiled_attention(2.0 * q, k, v, plan)

    def wrapped(*tensors: Tensor) -> Tensor:
        if wrapper == "checkpoint":
            return checkpoint(layer, *tensors, use_reentrant=False)
        return torch.compile(layer, backend="aot_eager", fullgraph=True)(*tensors)

    upstream = torch.randn(24, 2, 16, generator=torch.Generator().manual_seed(3))
    want = torch.autograd.grad(layer(*leaves), leaves, upstream)
    got = torch.autograd.grad(wrapped(*leaves), leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_result_without_gradient_is_the_same():
    plan, leaves = small_case()
    with torch.no_grad():
        without = tiled_attention(*leaves, plan)
    assert torch.equal(without, tiled_attention(*leaves, plan))


def test_a_pack_without_valid_tokens_or_without_tokens():
    for tokens in (5, 0):
        lengths = [tokens] if tokens else []
        plan = plan_bidirectional(
            starts_of(lengths), lengths, valid=torch.zeros(tokens, dtype=torch.bool), head_dim=16, dtype=torch.float32
        )
        leaves = [x.clone().requires_grad_() for x in attention_inputs(tokens, (2, 1), 16).values()]
        out = tiled_attention(*leaves, plan)
        out.backward(torch.ones_like(out))
        assert out.shape == (tokens, 2, 16)
        assert all((x == 0).all() for x in (out, *(leaf.grad for leaf in leaves)))


def test_what_the_kernels_cannot_run():
    assert tiled_unsupported_reason(128, torch.bfloat16) is None
    assert "129" in (tiled_unsupported_reason(129, torch.float32) or "")
    assert "float16" in (tiled_unsupported_reason(64, torch.float16) or "")
