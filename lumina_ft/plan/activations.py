"""Bytes of activations of one forward and backward pass, from the sizes of the model and of a pack.

Shape legend: T tokens, H hidden, A and K widths of all query and of all key heads, I width of an MLP, E experts, N rows
of the routed experts, m supervised text tokens, V text rows, n supervised image positions, C codebooks, D = H.

Counted are the tensors that autograd keeps, and what one operation holds beside them. Tensors of a few columns (norm
statistics, low-rank products, masks) are left out.
"""

from typing import NamedTuple

from lumina_ft.batch import Batch
from lumina_ft.kernels import CHUNK_BYTES, chunk_rows
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.u2_heads import MLP_RATIO

FP32 = 4


class Workload(NamedTuple):
    """The largest pack that a rank gets.

    Attributes:
        tokens: T. text: m. image: n.
    """

    tokens: int
    text: int
    image: int

    @classmethod
    def of(cls, batches: "list[Batch]", codebooks: int) -> "Workload":
        """Largest counts of some packs."""
        counts = [batch.supervised_counts() for batch in batches]
        return cls(
            max(batch.num_tokens for batch in batches),
            max(1, *(c["text"] for c in counts)),
            max(1, *(c["image"] // max(1, codebooks) for c in counts)),
        )


class Tape(NamedTuple):
    """One part of the model.

    Attributes:
        kept: bytes between its forward and its backward.
        working: most bytes beside those, while it runs forward, again, or backward.
    """

    kept: int
    working: int


def embedding_tape(config: U2Config, load: Workload, width: int) -> Tape:
    """Rows of both tables, masked and summed."""
    rows = load.tokens * config.hidden_size * width
    return Tape(2 * rows, 2 * rows)


def layer_tape(config: U2Config, load: Workload, width: int, *, routed: bool, spread: bool, recomputed: bool) -> Tape:
    """A decoder layer.

    Args:
        routed: it has experts. spread: ranks share them; then as many rows arrive as leave, as in a balanced router.
        recomputed: gradient checkpointing keeps its input only.
    """
    tokens, hidden = load.tokens, config.hidden_size
    head = config.head_dim or 0
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    # Two norms: their input in fp32, and what their weight multiplies.
    kept = 2 * tokens * hidden * (FP32 + width)
    # q, k, v as projected and by sample; q and k normed (in fp32 before) and rotated; the output by sample and token.
    kept += tokens * width * (2 * (queries + 2 * keys) + 2 * (queries + keys) + 2 * queries)
    kept += tokens * FP32 * (queries + keys)
    # Two residual sums.
    kept += 2 * tokens * hidden * width
    working = 3 * tokens * (queries + 2 * keys) * width
    mlp, mlp_working = _moe(config, load, width, spread) if routed else _mlp(tokens, config.intermediate_size, width)
    kept, working = kept + mlp, max(working, mlp_working)
    if not recomputed:
        return Tape(kept, working)
    return Tape(tokens * hidden * width, kept + working)


def _mlp(rows: int, inner: int, width: int) -> tuple[int, int]:
    """gate, up, silu, product; in backward, gradients of product, silu and both projections."""
    return 4 * rows * inner * width, 4 * rows * inner * width


def _moe(config: U2Config, load: Workload, width: int, spread: bool) -> tuple[int, int]:
    tokens, hidden, inner = load.tokens, config.hidden_size, config.moe_intermediate_size
    rows = tokens * config.num_experts_per_tok
    # The router's input and three [T, E] tensors, all in fp32.
    kept = tokens * FP32 * (hidden + 3 * config.num_experts)
    if config.num_shared_experts is not None:
        kept += _mlp(tokens, inner * config.num_shared_experts, width)[0] + tokens * hidden * width
    # Sorted rows; gate, silu, up, their product, and that times the routing weight.
    kept += rows * hidden * width + 5 * rows * inner * width
    # In forward: rows leaving, arriving, and sorted. In backward: gradients of the output, of each projection's input.
    wide = 5 if spread else 3
    return kept, wide * rows * hidden * width + 2 * rows * inner * (FP32 + width)


def text_tape(config: U2Config, load: Workload, width: int, *, chunked: bool, trained: bool) -> Tape:
    """Text head and loss.

    Args:
        chunked: `model.kernels` isn't `eager`. trained: the head's weight.
    """
    classes = config.text_rows or 0
    loss = _loss_tape(load.text, classes, config.hidden_size * classes, width, chunked=chunked, trained=trained)
    return Tape(loss.kept + load.text * config.hidden_size * width, loss.working)


def _loss_tape(rows: int, classes: int, weight: int, width: int, *, chunked: bool, trained: bool) -> Tape:
    """Logits and log-probabilities in fp32; in backward, gradients of both. Several chunks keep none of these.

    Args:
        weight: elements of the head's weight, whose gradient several chunks sum in fp32.
    """
    chunk = chunk_rows(classes, CHUNK_BYTES) if chunked else rows
    if rows <= chunk:
        return Tape(rows * classes * FP32, rows * classes * (2 * FP32 + width))
    return Tape(0, chunk * classes * 2 * FP32 + (weight * FP32 if trained else 0))


def image_tape(config: U2Config, load: Workload, width: int, *, recomputed: bool, chunked: bool, trained: bool) -> Tape:
    """Codebook head, image heads and loss.

    Args:
        recomputed: gradient checkpointing keeps the blocks' inputs only.
        chunked: the heads run one after the other, see `text_tape`. trained: their weights.
    """
    if not config.has_image:
        return Tape(0, 0)
    codes = load.image * config.id_columns
    rows = codes * config.hidden_size * width
    # Modulation (6), two norms and their modulated outputs (8), attention (7), MLP (2 x ratio + 2), residual sums (4).
    block = (6 + 8 + 7 + 2 * MLP_RATIO + 2 + 4) * rows
    heads = config.id_columns if chunked else 1
    weight = config.hidden_size * config.image_head_classes
    loss = _loss_tape(codes // heads, config.image_head_classes, weight, width, chunked=chunked, trained=trained)
    kept = heads * loss.kept + 6 * rows + config.ar_head_depth * (2 * rows if recomputed else block)
    return Tape(kept, loss.working + block * (2 if recomputed else 1))
