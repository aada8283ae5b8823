"""Block-diffusion attention: tiles, samples, FlexAttention, and a dense mask.

Shape legend: S tokens of a pack, L of a sample, Hq query heads, Hk key heads, D head dim.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lumina_ft.bench.kernels.contest import Contest, Outputs, Side, Work
from lumina_ft.bench.kernels.packs import LAYOUTS, build_pack
from lumina_ft.kernels import DensePlan, plan_segments
from lumina_ft.kernels.attention.ref import dense_attention
from lumina_ft.kernels.attention.segmented import segmented_attention
from lumina_ft.kernels.attention.tile_plan import plan_tiles
from lumina_ft.kernels.attention.tiled import tiled_attention, tiled_unsupported_reason
from lumina_ft.kernels.launch import unavailable_reason


class AttentionSizes(NamedTuple):
    """L, samples of a pack, Hq, Hk, D."""

    sample_tokens: int
    samples: int
    heads: int
    key_heads: int
    head_dim: int


SIZES = {
    "real": AttentionSizes(2048, 8, 16, 4, 128),
    "small": AttentionSizes(256, 8, 4, 1, 64),
    "tiny": AttentionSizes(64, 2, 2, 1, 16),
}

_WRITTEN_OUT_LIMIT = 2**34
"""Bytes of scores above which the written-out reference isn't tried."""


class Problem:
    """One pack with random queries, keys and values.

    Attributes:
        q: [S, Hq, D]. k, v: [S, Hk, D]. upstream: [S, Hq, D], gradient sent back.
    """

    def __init__(self, layout: str, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.pack = build_pack(layout, sample_tokens=sizes.sample_tokens, samples=sizes.samples).to(device)
        gen = torch.Generator(device=device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            return torch.randn(self.pack.tokens, heads, sizes.head_dim, generator=gen, device=device).to(dtype)

        self.q = normal(sizes.heads).requires_grad_()
        self.k, self.v = (normal(sizes.key_heads).requires_grad_() for _ in "kv")
        self.upstream = normal(sizes.heads)
        self.inputs = {"q": self.q, "k": self.k, "v": self.v}

    def reference(self) -> dict[str, Tensor]:
        """Sample by sample, in float64, or in float32 for bfloat16."""
        exact = torch.float64 if self.dtype == torch.float32 else torch.float32
        parts: list[list[Tensor]] = []
        for number, (start, length) in enumerate(zip(self.pack.starts, self.pack.lengths, strict=True)):
            at = slice(start, start + length)
            q, k, v = (x.detach()[at].to(exact).requires_grad_() for x in self.inputs.values())
            with sdpa_kernel(SDPBackend.MATH):
                out = _sdpa(q, k, v, attn_mask=self.pack.sample_mask(number))
            parts.append([out.detach(), *torch.autograd.grad(out, [q, k, v], self.upstream[at].to(exact))])
        names = ("output", "grad q", "grad k", "grad v")
        return {name: torch.cat(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}


def _heads_first(x: Tensor) -> Tensor:
    """[S, heads, D] -> [1, heads, S, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    """[S, heads, D] each, attn_mask [S, S] -> [S, Hq, D]."""
    # Repeated here: with `enable_gqa` and a mask, PyTorch writes all scores out on some devices.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = map(_heads_first, (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)[0].transpose(0, 1)


def contests(sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Contest]:
    """One per layout, built when asked for."""
    return (contest(layout, sizes, device, dtype) for layout in LAYOUTS)


def contest(layout: str, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> Contest:
    """Random queries, keys and values. `layout`: of the pack."""
    problem = Problem(layout, sizes, device, dtype)
    sides, unavailable = _sides(problem)
    pairs, heads, dim = problem.pack.allowed_pairs, sizes.heads, sizes.head_dim
    moved = problem.pack.tokens * 2 * (heads + sizes.key_heads) * dim * dtype.itemsize
    return Contest(
        operation="attention",
        case=layout,
        dtype=dtype,
        sizes={"tokens": problem.pack.tokens, **sizes._asdict()},
        inputs=problem.inputs,
        outputs={"output": problem.upstream},
        reference=problem.reference,
        sides=sides,
        unavailable=unavailable,
        forward=Work(4.0 * pairs * heads * dim, moved),
        backward=Work(10.0 * pairs * heads * dim, 2 * moved),
    )


def _sides(problem: Problem) -> tuple[dict[str, Side], dict[str, str]]:
    """Those that can run, and why the others can't."""
    sizes, dtype, tokens = problem.sizes, problem.dtype, problem.pack.tokens
    # Scores in the dtype and in float32, their softmax, and as much for the gradients.
    written_out = tokens**2 * sizes.heads * (4 * dtype.itemsize + 16)
    reasons = {
        "triton": unavailable_reason(problem.device, dtype) or tiled_unsupported_reason(sizes.head_dim, dtype),
        "torch": None,
        "flex": _flex_reason(problem.device),
        "sdpa": None,
        "eager": None if written_out <= _WRITTEN_OUT_LIMIT else f"scores would take {written_out / 2**30:.0f} GiB",
    }
    builders = {"triton": _tiled, "torch": _segmented, "flex": _flex, "sdpa": _dense, "eager": _written_out}
    sides = {name: build(problem) for name, build in builders.items() if reasons[name] is None}
    return sides, {name: reason for name, reason in reasons.items() if reason is not None}


_Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def _planned(problem: Problem, plan: Callable[[], Any], attend: _Attend) -> Side:
    """A side with a plan per batch."""
    made: list[Any] = []

    def prepare() -> None:
        made[:] = [plan()]

    def run() -> Outputs:
        return (attend(problem.q, problem.k, problem.v, made[0]),)

    return Side(run, prepare)


def _tiled(problem: Problem) -> Side:
    arguments, sizes = problem.pack.plan_arguments(), problem.sizes
    return _planned(
        problem,
        lambda: plan_tiles(
            **arguments,
            head_dim=sizes.head_dim,
            dtype=problem.dtype,
            heads_per_key=sizes.heads // sizes.key_heads,
        ),
        tiled_attention,
    )


def _segmented(problem: Problem) -> Side:
    arguments = problem.pack.plan_arguments()
    return _planned(problem, lambda: plan_segments(**arguments, dtype=problem.dtype), segmented_attention)


def _dense(problem: Problem) -> Side:
    return _planned(problem, problem.pack.dense_mask, _sdpa)


def _written_out(problem: Problem) -> Side:
    return _planned(problem, lambda: DensePlan(problem.pack.dense_mask().unsqueeze(0)), dense_attention)


def _flex_reason(device: torch.device) -> str | None:
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "torch.compile finds no C++ compiler"
    return None


@cache
def _compiled_flex() -> Callable[..., Any]:
    """One for all packs: their masks compile to the same code."""
    return torch.compile(flex_attention, dynamic=False)


def _flex(problem: Problem) -> Side:
    """The rule of one sample as a table that the mask looks up; on the CPU it has a forward pass only."""
    pack, length = problem.pack, problem.pack.lengths[0]
    rule = pack.sample_mask(0)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // length == key // length) & rule[query % length, key % length]

    forward_only = problem.device.type == "cpu"

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        q, k, v = (_heads_first(x.detach() if forward_only else x) for x in (q, k, v))
        return _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)

    def plan() -> Any:
        return create_block_mask(allowed, None, None, pack.tokens, pack.tokens, device=str(problem.device))

    return _planned(problem, plan, attend)._replace(forward_only=forward_only)
