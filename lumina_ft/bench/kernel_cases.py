"""Every operation that has Triton kernels, in all forms that compile to other code, at the sizes they are made for.

The same cases serve ahead-of-time compilation, where tensors have no memory, and tuning on a GPU.

Shape legend: T tokens, H hidden, I expert width, E experts, K chosen experts per token, N = T * K rows, r rank, S
tokens of a pack, Hq query heads, Hk key heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lumina_ft.bench.kernels.packs import Pack, build_pack
from lumina_ft.kernels.attention.segmented import SegmentedPlan, plan_segments, segmented_attention
from lumina_ft.kernels.attention.tile_plan import TilePlan, plan_tiles
from lumina_ft.kernels.attention.tiled import tiled_attention
from lumina_ft.kernels.moe.fused import fused_experts, fused_mlp
from lumina_ft.kernels.moe.grouped import grouped_experts, grouped_mlp
from lumina_ft.kernels.moe.weights import Experts, Lora, Projection
from lumina_ft.kernels.router.fused import fused_route
from lumina_ft.kernels.router.ref import Routing, route


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases; the defaults are those of InternLumina-U2 with packs of 16,384 tokens.

    Attributes:
        tokens, hidden, width, experts, top_k, rank: T, H, I, E, K, r.
        groups, kept_groups: of the router.
        samples, sample_tokens: of a pack, S = samples * sample_tokens.
        query_heads, key_heads: Hq, Hk.
    """

    tokens: int = 8192
    hidden: int = 2048
    width: int = 512
    experts: int = 256
    top_k: int = 8
    rank: int = 16
    groups: int = 8
    kept_groups: int = 4
    samples: int = 8
    sample_tokens: int = 2048
    query_heads: int = 16
    key_heads: int = 4


SIZES = Sizes()

HEAD_DIMS = (16, 32, 64, 80, 128)
"""64 and 128 are those of models; the others are padded, 80 to 128, and serve small ones."""

Results = dict[str, Tensor]
"""Outputs and gradients by name."""

Run = Callable[[], Results]


class Implementation(NamedTuple):
    """One function for each operation; they share their contracts."""

    experts: Callable[[Tensor, Experts, Tensor, Tensor, Tensor | None], Tensor]
    mlp: Callable[[Tensor, Experts, Tensor, Tensor, Tensor | None], Tensor]
    route: Callable[..., Routing]
    plan_attention: Callable[[Pack, int, int, torch.dtype, torch.device], Any]
    attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def _tile_plan(pack: Pack, head_dim: int, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> TilePlan:
    return plan_tiles(
        **pack.plan_arguments(), head_dim=head_dim, heads_per_key=heads_per_key, dtype=dtype, device=device
    )


def _segment_plan(
    pack: Pack, head_dim: int, heads_per_key: int, dtype: torch.dtype, device: torch.device
) -> SegmentedPlan:
    return plan_segments(**pack.plan_arguments(), dtype=dtype)


TRITON = Implementation(fused_experts, fused_mlp, fused_route, _tile_plan, tiled_attention)
TORCH = Implementation(grouped_experts, grouped_mlp, route, _segment_plan, segmented_attention)


class Case(NamedTuple):
    """One operation in one form.

    Attributes:
        name: "operation form dtype".
        dtype: that its matrix products round to.
        prepare: draws the inputs on a device; what it returns runs the operation forward and backward.
    """

    name: str
    dtype: torch.dtype
    prepare: Callable[[torch.device, Implementation], Run]


@dataclass(frozen=True)
class ExpertsForm:
    """How routed experts are used.

    Attributes:
        adapted: projections with adapters.
        dropout: of the adapters.
        trained: projections whose own weights are trained.
        input_grad: the input needs a gradient; it doesn't where everything below is frozen.
        routed: rows are gathered by token; otherwise they are sorted already, as on a rank with some of the experts.
        inference: forward only.
    """

    name: str
    adapted: tuple[str, ...] = ()
    dropout: float = 0.0
    trained: tuple[str, ...] = ()
    input_grad: bool = True
    routed: bool = True
    inference: bool = False


_ALL = ("gate", "up", "down")

EXPERTS_FORMS = (
    ExpertsForm("frozen"),
    ExpertsForm("trained", trained=_ALL),
    ExpertsForm("adapted", adapted=_ALL),
    ExpertsForm("adapted-dropout", adapted=_ALL, dropout=0.05),
    ExpertsForm("adapted-down", adapted=("down",)),
    ExpertsForm("adapted-first-layer", adapted=_ALL, dropout=0.05, input_grad=False),
    ExpertsForm("inference", inference=True),
    ExpertsForm("adapted-inference", adapted=_ALL, inference=True),
    ExpertsForm("sorted-frozen", routed=False),
    ExpertsForm("sorted-trained", trained=_ALL, routed=False),
    ExpertsForm("sorted-adapted-dropout", adapted=_ALL, dropout=0.05, routed=False),
)

UNEVEN_FORMS = (
    ExpertsForm("uneven-trained", trained=_ALL),
    ExpertsForm("uneven-adapted-dropout", adapted=_ALL, dropout=0.05),
)
"""For sizes that tiles don't divide."""

_FULL_FORMS = ("trained", "adapted-dropout", "sorted-adapted-dropout")
"""In float32, which serves checks, the forms that have all the parts of the others."""


def _draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)


def _runner(outputs: Run, upstream: Results, leaves: Results) -> Run:
    """A function that computes outputs, and gradients of leaves from the upstream gradients of outputs."""

    def run() -> Results:
        results = outputs()
        if not leaves:
            return results
        names = list(upstream)
        gradients = torch.autograd.grad(
            [results[name] for name in names], list(leaves.values()), [upstream[name] for name in names]
        )
        named = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
        return {name: result.detach() for name, result in results.items()} | named

    return run


def experts_case(form: ExpertsForm, sizes: Sizes, dtype: torch.dtype) -> Case:
    """Routed experts in one form."""

    def prepare(device: torch.device, implementation: Implementation) -> Run:
        leaves: dict[str, Tensor] = {}

        def leaf(name: str, shape: tuple[int, ...], *, trained: bool, of: torch.dtype = dtype, scale: float = 1.0):
            tensor = _draw(shape, of, device, scale=scale)
            if trained and not form.inference:
                leaves[name] = tensor.requires_grad_()
            return tensor

        def projection(name: str, outputs: int, inputs: int) -> Projection:
            lora = None
            if name in form.adapted:
                a = leaf(f"{name}.a", (sizes.experts, sizes.rank, inputs), trained=True, scale=inputs**-0.5)
                b = leaf(f"{name}.b", (sizes.experts, outputs, sizes.rank), trained=True, scale=sizes.rank**-0.5)
                # The stream is but a literal in a hash: one for all compiles to fewer kernels.
                lora = Lora(a, b, 2.0, form.dropout)
            weight = leaf(name, (sizes.experts, outputs, inputs), trained=name in form.trained, scale=inputs**-0.5)
            return Projection(weight, lora)

        rows = sizes.tokens * sizes.top_k
        length = sizes.tokens if form.routed else rows
        x = leaf("x", (length, sizes.hidden), trained=form.input_grad)
        experts = Experts(
            projection("gate", sizes.width, sizes.hidden),
            projection("up", sizes.width, sizes.hidden),
            projection("down", sizes.hidden, sizes.width),
        )
        weight_shape = (sizes.tokens, sizes.top_k) if form.routed else (rows, 1)
        weight = leaf("routing weight", weight_shape, trained=form.input_grad, of=torch.float32)
        keys = torch.arange(rows, device=device).view(weight_shape) if form.dropout else None
        chosen = _draw((sizes.tokens, sizes.experts), torch.float32, device).topk(sizes.top_k).indices
        ends = torch.arange(1, sizes.experts + 1, device=device) * rows // sizes.experts

        def outputs() -> Results:
            with torch.set_grad_enabled(not form.inference):
                if form.routed:
                    return {"out": implementation.experts(x, experts, chosen, weight, keys)}
                return {"out": implementation.mlp(x, experts, weight, ends.to(torch.int32), keys)}

        return _runner(outputs, {"out": _draw((length, sizes.hidden), dtype, device)}, leaves)

    return Case(f"experts {form.name} {_name(dtype)}", dtype, prepare)


def route_case(sizes: Sizes, *, groups: int, bias: bool) -> Case:
    """The router; its kernels are in float32 whatever the model is in."""

    def prepare(device: torch.device, implementation: Implementation) -> Run:
        hidden = _draw((sizes.tokens, sizes.hidden), torch.float32, device).requires_grad_()
        weight = _draw((sizes.experts, sizes.hidden), torch.float32, device, scale=sizes.hidden**-0.5)
        expert_bias = torch.zeros(sizes.experts, device=device) if bias else None
        kept = min(groups, sizes.kept_groups)

        def outputs() -> Results:
            routing = implementation.route(
                hidden, weight, expert_bias, num_groups=groups, kept_groups=kept, top_k=sizes.top_k, scaling=2.5
            )
            return {"topk_weight": routing.topk_weight, "topk_idx": routing.topk_idx}

        upstream = {"topk_weight": _draw((sizes.tokens, sizes.top_k), torch.float32, device)}
        return _runner(outputs, upstream, {"hidden": hidden})

    return Case(
        f"route {sizes.experts} experts in {groups} groups{' with bias' if bias else ''}", torch.float32, prepare
    )


def attention_case(sizes: Sizes, *, head_dim: int, dtype: torch.dtype) -> Case:
    """Attention of a text pack: other masks differ in data only. Values are a view of a wider matrix, as in models."""

    def prepare(device: torch.device, implementation: Implementation) -> Run:
        pack = build_pack("text", samples=sizes.samples, sample_tokens=sizes.sample_tokens)
        # Where tensors have no memory, a plan's data still comes from the host.
        pack = pack if device.type == "meta" else pack.to(device)
        shared = sizes.query_heads // sizes.key_heads
        plan = implementation.plan_attention(pack, head_dim, shared, dtype, device)
        q = _draw((pack.tokens, sizes.query_heads, head_dim), dtype, device).requires_grad_()
        k = _draw((pack.tokens, sizes.key_heads, head_dim), dtype, device).requires_grad_()
        v = _draw((pack.tokens, sizes.query_heads + 2 * sizes.key_heads, head_dim), dtype, device)
        v = v[:, -sizes.key_heads :].requires_grad_()

        def outputs() -> Results:
            return {"out": implementation.attention(q, k, v, plan)}

        return _runner(outputs, {"out": _draw(tuple(q.shape), dtype, device)}, {"q": q, "k": k, "v": v})

    heads = f"{sizes.query_heads} of {sizes.key_heads} heads"
    return Case(f"attention head dim {head_dim}, {heads} {_name(dtype)}", dtype, prepare)


def kernel_cases(sizes: Sizes = SIZES) -> list[Case]:
    """All operations in all forms; two cases with sizes that tiles don't divide, so that every mask is compiled too."""
    uneven = replace(sizes, hidden=sizes.hidden + 16, width=sizes.width + 16, rank=sizes.rank // 2 + 1)
    half, full = torch.bfloat16, torch.float32
    cases = [experts_case(form, sizes, half) for form in EXPERTS_FORMS]
    cases += [experts_case(form, sizes, full) for form in EXPERTS_FORMS if form.name in _FULL_FORMS]
    cases += [experts_case(form, uneven, dtype) for form in UNEVEN_FORMS for dtype in (half, full)]
    cases += [attention_case(sizes, head_dim=head_dim, dtype=half) for head_dim in HEAD_DIMS]
    cases += [attention_case(sizes, head_dim=head_dim, dtype=full) for head_dim in HEAD_DIMS if head_dim != 80]
    # A key head for each query head: tiles don't pack heads then.
    own_keys = replace(sizes, key_heads=sizes.query_heads)
    cases += [attention_case(own_keys, head_dim=head_dim, dtype=half) for head_dim in (64, 128)]
    cases += [route_case(sizes, groups=sizes.groups, bias=True)]
    cases += [route_case(replace(sizes, experts=experts), groups=1, bias=False) for experts in (64, 512)]
    return cases


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
