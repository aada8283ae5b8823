"""Training steps of whole models under each choice of kernels: the same weights, batches and losses, other times.

Shape legend: S tokens of the pack, C id columns.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lumina_ft.bench.kernels.measure import one_thread, peak_bytes
from lumina_ft.bench.kernels.packs import Pack, build_pack, join
from lumina_ft.errors import ConfigError, RunError
from lumina_ft.kernels.launch import unavailable_reason
from lumina_ft.models.u2 import U2ForDiffusion, U2Output
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.zero3 import default_dtype
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT

logger = logging.getLogger(__name__)

KERNELS = ("triton", "torch", "eager")
_WEIGHTS = {"text": 1.0, "image": 1.0, "balance": 0.01}
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of a step's loss between choices, as a share of the first step's: updates let them drift apart."""
_NOISED = 0.5


class StepCase(NamedTuple):
    """One model and its batch.

    Attributes:
        config: of the model.
        packs: layout, tokens of a sample, samples; joined to one pack.
        kernels: choices that are compared.
    """

    config: Callable[[], U2Config]
    packs: tuple[tuple[str, int, int], ...]
    kernels: tuple[str, ...] = KERNELS


def _wide_layer() -> U2Config:
    """One layer with the published number of experts and a narrow width."""
    return U2Config(
        vocab_size=512,
        pad_token_id=0,
        hidden_size=256,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_attention_heads=4,
        num_key_value_heads=1,
        moe_intermediate_size=64,
    )


def _tiny() -> U2Config:
    """Both kinds of layers, small enough for interpreted kernels."""
    return U2Config(
        vocab_size=320,
        pad_token_id=0,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )


def _real_width() -> U2Config:
    """A dense and a MoE layer of the published size, with its vocabulary."""
    return U2Config(num_hidden_layers=2)


CASES = {
    "demo": StepCase(lambda: U2Config.load("u2-tiny"), (("text", 256, 4), ("image", 256, 4))),
    "experts": StepCase(_wide_layer, (("text", 256, 2),)),
    "tiny": StepCase(_tiny, (("text", 64, 2),)),
    # The loop over experts and the dense mask would take minutes, or memory that isn't there.
    "real": StepCase(_real_width, (("text", 2048, 4),), ("triton", "torch")),
}


def draw_batch(pack: Pack, config: U2Config, device: torch.device) -> dict[str, Tensor]:
    """Keyword arguments of a forward pass: random ids, about half of the noisy answer positions supervised.

    Ids are not replaced by mask ids: a step takes as long without.
    """
    gen = torch.Generator().manual_seed(0)
    columns, tokens = config.id_columns, pack.tokens
    # Control tokens follow padding in the demo's vocabulary; text ids begin the published one.
    words = config.pad_token_id or 256
    ids = torch.randint(1, words, (tokens, 1), generator=gen).expand(tokens, columns).clone()
    media = pack.type_ids == TYPE_ANSWER_MEDIA
    ids[media] = torch.randint(config.image_head_classes, (int(media.sum()), columns), generator=gen)
    answer = media | (pack.type_ids == TYPE_ANSWER_TEXT)
    noised = answer & ~pack.is_clean & (torch.rand(tokens, generator=gen) < _NOISED)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(~noised.unsqueeze(1), IGNORE),
        "type_ids": pack.type_ids,
        "turn_ids": pack.turn_ids,
        "block_ids": pack.block_ids,
        "is_clean": pack.is_clean,
        "cu_seqlens": pack.cu_seqlens,
    }
    return {name: value.to(device) for name, value in batch.items()}


class _Trainee:
    """A model under one choice of kernels, with its optimizer; its weights are those of `like`, if that is given.

    Attributes:
        times: seconds of forward, backward and optimizer of each step. losses: of each step.
    """

    def __init__(
        self, config: U2Config, kernels: str, device: torch.device, dtype: torch.dtype, like: "_Trainee | None"
    ) -> None:
        with torch.device(device), default_dtype(dtype):
            model = U2ForDiffusion(config, kernels=kernels)
        if like is None:
            model.init_weights_(0)
        else:
            # Drawing the weights takes longer than all steps.
            model.load_state_dict(like.model.state_dict())
        self.model, self.device = model.train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.times: list[tuple[float, float, float]] = []
        self.losses: list[float] = []
        self.attention: str | None = None

    def step(self, batch: dict[str, Tensor]) -> None:
        """One update; its loss and times are kept."""
        marks = [self._now()]
        out = self.model(**batch)
        loss = _mean_loss(out)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self._now())
        forward, backward, optimizer = (end - start for start, end in zip(marks, marks[1:], strict=False))
        self.times.append((forward, backward, optimizer))
        self.losses.append(float(loss.detach()))
        self.attention = out.attention

    def _now(self) -> float:
        if self.device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """Medians in ms without the first step, which compiles and warms up."""
        timed = self.times[1:]
        forward, backward, optimizer = (1e3 * median(column) for column in zip(*timed, strict=True))
        return {
            "step_ms": 1e3 * median(map(sum, timed)),
            "forward_ms": forward,
            "backward_ms": backward,
            "optimizer_ms": optimizer,
            "attention": self.attention,
            "losses": self.losses,
        }


def _mean_loss(out: U2Output) -> Tensor:
    """Sum of each loss over its count."""
    assert out.losses is not None
    terms = [_WEIGHTS[name] * loss.total.float() / loss.count for name, loss in out.losses.items()]
    return torch.stack(terms).sum()


def bench_step(*, cases: Sequence[str] | None = None, steps: int = 10) -> dict[str, Any]:
    """Forward, backward and optimizer step under each choice of kernels, in turn within each step.

    On a GPU in bfloat16 by the wall clock; on the CPU in float32, one thread's processor time.

    Args:
        cases: names from CASES; None: `real` as well as the small ones on a GPU, only these on a CPU.
        steps: at least 2; the first is not timed.

    Returns:
        `device`, `clock`, and `cases`: name -> sizes, figures of each choice, and ratios of step times to torch's.

    Raises:
        ConfigError: the case of real width without a GPU.
        RunError: the choices' losses drift apart.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    names = cases or (["demo", "experts", "real"] if on_gpu else ["demo", "experts"])
    if "real" in names and not on_gpu:
        raise ConfigError("--case — real — needs a CUDA device: two models in training take 48 GB — use experts")
    with nullcontext() if on_gpu else one_thread():
        results = {name: _run_case(name, device, steps) for name in names}
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "clock": "wall time" if on_gpu else "processor time of one thread",
        "steps": steps,
        "cases": results,
    }


def _run_case(name: str, device: torch.device, steps: int) -> dict[str, Any]:
    case, dtype = CASES[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    reason = unavailable_reason(device, dtype)
    unavailable = {} if reason is None else {"triton": reason}
    pack = join([build_pack(layout, sample_tokens=size, samples=count) for layout, size, count in case.packs])
    batch = draw_batch(pack, case.config(), device)
    trainees: dict[str, _Trainee] = {}
    for kernels in case.kernels:
        if kernels not in unavailable:
            first = next(iter(trainees.values()), None)
            trainees[kernels] = _Trainee(case.config(), kernels, device, dtype, first)
    logger.info("bench step: %s, %s", name, ", ".join(trainees))
    peaks = {kernels: peak_bytes(device, lambda t=trainee: t.step(batch)) for kernels, trainee in trainees.items()}
    for _ in range(steps - 1):
        for trainee in trainees.values():
            trainee.step(batch)
    _check_losses(name, trainees, _TOLERANCES[dtype])
    sides = {kernels: {**trainee.figures(), "peak_bytes": peaks[kernels]} for kernels, trainee in trainees.items()}
    base = sides["torch"]["step_ms"]
    return {
        "tokens": pack.tokens,
        "parameters": sum(p.numel() for p in trainees["torch"].model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "sides": sides,
        "unavailable": unavailable,
        "ratios": {
            f"{kernels} / torch": side["step_ms"] / base for kernels, side in sides.items() if kernels != "torch"
        },
    }


def _check_losses(name: str, trainees: dict[str, _Trainee], limit: float) -> None:
    want = trainees["torch"].losses
    for kernels, trainee in trainees.items():
        for step, (got, expected) in enumerate(zip(trainee.losses, want, strict=True)):
            difference = abs(got - expected) / abs(want[0])
            if not difference <= limit:
                raise RunError(
                    f"bench step: {name}, {kernels} — loss of step {step} differs by {difference:.1e} from torch's — "
                    f"must be <= {limit:.0e} — report this bug"
                )


def print_steps(result: dict[str, Any]) -> None:
    """One table per case on stderr."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, width=120)
    console.print(
        f"{result['device']}, torch {result['torch']}, {result['clock']}, medians of {result['steps'] - 1} steps"
    )
    for name, case in result["cases"].items():
        title = f"{name}: {case['parameters']:,} parameters, {case['tokens']} tokens, {case['dtype']}"
        missing = "\n".join(f"{kernels}: {reason}" for kernels, reason in case["unavailable"].items())
        table = Table(title=title, title_justify="left", caption=missing, caption_justify="left", box=SIMPLE_HEAD)
        table.add_column("kernels", no_wrap=True)
        for column in ("step ms", "forward ms", "backward ms", "optimizer ms", "peak MB", "step / torch"):
            table.add_column(column, justify="right")
        for kernels, side in case["sides"].items():
            times = (f"{side[f'{part}_ms']:.4g}" for part in ("step", "forward", "backward", "optimizer"))
            ratio = case["ratios"].get(f"{kernels} / torch", 1.0)
            table.add_row(kernels, *times, f"{side['peak_bytes'] / 1e6:.0f}", f"{ratio:.2f}")
        console.print(table)
