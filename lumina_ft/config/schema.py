"""Configuration of a training run. Everything is frozen, unknown keys are refused, units are in the names.

The schema is the documentation: every field carries the sentence that the docs and `--help` print.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from lumina_ft.config.fields import BelowOne, Count, CountOrZero, Fraction, NonNegative, Positive, Range, Section
from lumina_ft.config.groups import ADAPTER_GROUP, GROUPS_U2, expand_group
from lumina_ft.config.lora_schema import LoraConfig


class ModelConfig(Section):
    path: Path | None = None
    """Checkpoint directory: split, packed or sharded layout of either; detected from its keys."""
    config: str | None = None
    """A `config.json`, or a shipped name (`u2-tiny`), to start from random weights. Needs `random_init: true`."""
    random_init: bool = False
    """Start from random weights drawn from `seed`; an explicit wish, never a fallback."""
    tokenizer: str | None = None
    """Tokenizer directory, or `demo` for the small one that ships with the package. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype. bfloat16 keeps fp32 master weights in the optimizer."""
    gradient_checkpointing: bool = True
    """Recompute decoder layers in backward: less memory, about a third more time."""
    kernels: Literal["auto", "triton", "torch", "eager"] = "auto"
    """Attention, routed experts and router: `triton` kernels (NVIDIA GPU), `torch` operations, or the readable
    reference, `eager`. A name stands for all of them or is refused; `auto` takes the fastest that can run and says once
    which. Text and image losses never hold all logits, except under `eager`."""

    @model_validator(mode="after")
    def _source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path (a checkpoint) and model.config (with random_init: true)")
        if self.config is not None and not self.random_init:
            raise ValueError("model.config starts from random weights; set model.random_init: true to say so")
        if self.path is not None and self.random_init:
            raise ValueError("model.random_init: true contradicts model.path; use model.config")
        return self


class NoiseConfig(Section):
    """Block-diffusion noise, drawn at load time from (seed, epoch, sample id)."""

    text_sigma: Range = (0.3, 0.8)
    """One rate per sample, uniform in this range; each answer token is masked with that probability (spec §6)."""
    image_ratio: Literal["cosine", "uniform"] = "cosine"
    """Share of image positions masked: cos(pi*r/2) or r, r uniform; at least one, newline rows never."""
    image_ratio_range: Range = (0.0, 1.0)
    """Bounds of r."""


class DataConfig(Section):
    """What a run reads: a directory written by `lumina-ft data build`."""

    path: Path
    """Built dataset directory."""
    eval_path: Path | None = None
    """Built dataset for the held-out loss; overrides `eval_fraction`."""
    eval_fraction: BelowOne = 0.0
    """Share of samples held out by a hash of their id, the same for every stage and world size."""
    max_pack_tokens: Count = 8192
    """S: every pack has at most this many tokens; a longer sample is an error."""
    packing: Literal["best_fit", "greedy", "none"] = "best_fit"
    """best_fit: tightest fit in windows of shuffled samples; greedy: next fit in shuffled order; none: one a pack."""
    pad_packs: bool = False
    """Pad every pack to `max_pack_tokens`: constant shapes for compilers and allocators, but idle tokens."""
    tasks: tuple[str, ...] | None = None
    """Use only these tasks of the dataset (text, understand, t2i)."""
    block_tokens: Count = 32
    """L: length of a text diffusion block (spec §2)."""
    answer_tail: Literal["eoa", "pad", "short"] = "eoa"
    """How the last block of a text answer is filled: supervised EOA, supervised pad, or left short (leaks length)."""
    condition_drop: Fraction = 0.1
    """Share of image-generating samples whose user turn becomes <uncondition>, for guidance (spec §6)."""
    noise: NoiseConfig = NoiseConfig()


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Positive = 1e-5
    """Peak learning rate of a stage that names none."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of AdamW's running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegative = 0.1
    """Not applied to norms, biases and other 1-D parameters."""
    decay_unused: bool = True
    """false: a parameter whose gradient is exactly zero in a step doesn't decay in that step."""
    max_grad_norm: NonNegative = 1.0
    """Global gradient-norm clip; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: Fraction = 0.03
    """Share of the stage's steps with rising lr."""
    min_lr_ratio: Fraction = 0.0
    """Final lr as a share of the peak (cosine, linear)."""
    expert_bias_rate: NonNegative = 0.0
    """After each step the selection bias of every routed expert with less than the mean load rises by this much, and
    falls for one with more; also where the router is frozen. 0 leaves the bias as it is. Scores lie in 0…1: 0.001 is
    usual."""


class StageConfig(Section):
    """One stage: what is trained, how fast, how long, on which data."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Name in metrics, pictures and overrides; letters, digits, `_`, and after the first character `.-`."""
    train: tuple[str, ...] = ("all",)
    """Parameter groups or aliases to train in full. In a stage that trains the adapter the default is none."""
    freeze: tuple[str, ...] = ()
    """Groups or aliases taken out of `train` again."""
    lr: Positive | None = None
    """Peak learning rate of this stage; default optim.lr."""
    group_lr: dict[str, Positive] = {}
    """Peak learning rate per group or alias; a group named outright beats an alias."""
    steps: Count | None = None
    """Length in optimizer steps. Exactly one of steps and epochs."""
    epochs: Positive | None = None
    """Length in (fractional) passes over the packs."""
    data: dict[str, Any] = {}
    """Overrides of the run's `data` section for this stage."""
    schedule: Literal["cosine", "linear", "constant"] | None = None
    """Default optim.schedule."""
    expert_bias_rate: NonNegative | None = None
    """Default optim.expert_bias_rate."""
    lora: Literal["train", "freeze", "off"] = "off"
    """`train` the adapter (a new one, or the one kept so far), keep it active but `freeze` it, or run without: `off`.
    With a `lora` section the default is `train`."""
    lora_at_end: Literal["keep", "merge", "drop"] = "keep"
    """What the next stage starts from: the adapter as it is, weights with the adapter merged into them, or weights
    without it. After the last stage `merge` leaves a plain model, `keep` and `drop` leave the adapter."""

    @model_validator(mode="after")
    def _length(self) -> "StageConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"stage {self.name!r} needs exactly one of steps and epochs")
        return self


class LossConfig(Section):
    """Weights of the terms; each is a sum over the step's positions divided by their global count."""

    text: NonNegative = 1.0
    """Cross-entropy of masked answer text, per position."""
    image: NonNegative = 1.0
    """Cross-entropy of masked image codes, per position and codebook."""
    balance: NonNegative = 0.01
    """Load balancing E * sum(f_i * P_i), averaged over MoE layers (T5)."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> "LossConfig":
        if self.text == 0 and self.image == 0:
            raise ValueError("loss.text=0 and loss.image=0 leave nothing to train on; give one of them a weight")
        return self


class TrainConfig(Section):
    packs_per_step: Count = 8
    """Packs of one optimizer step over all ranks; ranks x accumulation must divide it."""
    log_every_steps: Count = 1
    """Record metrics every N steps."""
    eval_every_steps: CountOrZero = 0
    """Held-out loss every N steps; 0: at the end of each stage only."""
    save_every_steps: CountOrZero = 0
    """Checkpoint every N steps; 0: at the end of each stage only."""
    keep_checkpoints: Count = 2
    """Older step checkpoints are deleted; stage ends are kept."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A non-finite value anywhere stops the run, or skips the step on every rank; batch ids are dumped either way."""
    max_skipped_steps: Count = 3
    """With `skip`: this many skipped steps in a row stop the run."""
    tensorboard: bool = True
    """Also write TensorBoard events, one run per stage."""
    plots: bool = True
    """Write loss curves and the expert load as PNG at the end of each stage."""


class ParallelConfig(Section):
    ranks: Count = 1
    """Processes that `lumina-ft sft` starts on this machine. Under torchrun or deepspeed: unset, or equal to theirs."""
    zero: str = "zero2"
    """`zero0`…`zero3` (ds_configs/), or the path of a DeepSpeed JSON file."""
    expert_parallel_size: Count = 1
    """Ranks that share the routed experts among them and exchange tokens; 1: every rank holds every expert. Must divide
    the ranks and the model's experts, and needs ZeRO-1, 2 or 3."""
    threads_per_rank: CountOrZero = 0
    """CPU threads of a rank; 0: this machine's cores divided by its ranks."""
    timeout_minutes: Annotated[Positive, Field(le=525_600)] = 30.0
    """Longest time without a sign of life from a rank: a module, a collective, a pack, a tensor read or written. Then
    the run ends with a report on every rank."""
    grace_seconds: Annotated[NonNegative, Field(le=86_400)] = 600.0
    """After SIGTERM or Ctrl-C: time to finish the step and save before the ranks are killed; 0 kills at once."""
    master_port: Annotated[CountOrZero, Field(le=65_535)] = 0
    """0 takes a free port."""


class RunConfig(Section):
    """The whole run: `lumina-ft sft --config run.yaml`."""

    family: Literal["u2"] = "u2"
    """Model family."""
    output_dir: Path
    """Run directory: metrics, checkpoints, pictures, log."""
    seed: Annotated[CountOrZero, Field(le=2**63)] = 0
    """Drives order, noise, condition drops and random weights."""
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig | None = None
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _fill_stages(cls, values: Any) -> Any:
        """Defaults of a stage that depend on whether the run has an adapter; the resolved config states them."""
        if not isinstance(values, dict):
            return values
        given = cast(dict[str, Any], values)
        if not isinstance(given.get("stages"), list | tuple):
            return given
        default = "train" if given.get("lora") is not None else "off"
        stages: list[Any] = []
        for stage in cast(list[Any], given["stages"]):
            if isinstance(stage, dict):
                stage = {"lora": default, **cast(dict[str, Any], stage)}
                if stage["lora"] == "train":
                    stage = {"train": (), **stage}
            stages.append(stage)
        return {**given, "stages": stages}

    @model_validator(mode="after")
    def _adapter_course(self) -> "RunConfig":
        """The adapter's way through the stages must be possible, and said outright where there is a choice."""
        held = False
        for i, stage in enumerate(self.stages):
            key = f"stages.{i}.lora"
            if stage.lora != "off" and self.lora is None:
                raise ValueError(f"{key}={stage.lora!r} needs a `lora` section; add one, or set {key}: off")
            if stage.lora == "freeze" and not held:
                raise ValueError(f"{key}='freeze': no earlier stage keeps an adapter that could be frozen; use train")
            if stage.lora == "off" and held:
                raise ValueError(
                    f"{key}='off': stage {self.stages[i - 1].name!r} keeps its adapter; set stages.{i - 1}.lora_at_end "
                    "to merge or drop, or this stage's lora to freeze"
                )
            if stage.lora == "off" and stage.lora_at_end != "keep":
                raise ValueError(f"stages.{i}.lora_at_end={stage.lora_at_end!r}: the stage has no adapter; remove it")
            held = stage.lora != "off" and stage.lora_at_end == "keep"
        if self.lora is not None and all(stage.lora == "off" for stage in self.stages):
            raise ValueError("lora: every stage has lora: off; remove the section, or let a stage train it")
        return self

    @model_validator(mode="after")
    def _cross_checks(self) -> "RunConfig":
        names = [s.name for s in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stages: the name {name!r} occurs {names.count(name)} times; names must differ")
        for i, stage in enumerate(self.stages):
            self.stage_data(i)
            groups = self.trained_groups(i)
            for key in stage.group_lr:
                if key == ADAPTER_GROUP:
                    if stage.lora != "train":
                        raise ValueError(f"stages.{i}.group_lr: stage {stage.name!r} trains no adapter; remove 'lora'")
                elif not set(expand_group(key, f"stages.{i}.group_lr")) & set(groups):
                    raise ValueError(f"stages.{i}.group_lr: {key!r} is frozen in stage {stage.name!r}; remove it")
        if self.train.packs_per_step % self.parallel.ranks:
            per_rank = -(-self.train.packs_per_step // self.parallel.ranks)
            raise ValueError(
                f"train.packs_per_step={self.train.packs_per_step} must be a multiple of parallel.ranks="
                f"{self.parallel.ranks}; use {per_rank * self.parallel.ranks}"
            )
        return self

    def trained_groups(self, index: int) -> tuple[str, ...]:
        """Groups of base weights that stage `index` trains in full, in canonical order.

        Raises:
            ValueError: an unknown name, or the stage trains nothing at all.
        """
        stage = self.stages[index]
        beside = self.lora.modules_to_save if self.lora is not None and stage.lora == "train" else ()
        return selected_groups(stage, beside)

    def bias_rate(self, index: int) -> float:
        """`expert_bias_rate` of stage `index`."""
        rate = self.stages[index].expert_bias_rate
        return self.optim.expert_bias_rate if rate is None else rate

    def stage_data(self, index: int) -> DataConfig:
        """The data section of stage `index`, with that stage's overrides."""
        merged = {**self.data.model_dump(), **self.stages[index].data}
        if isinstance(self.stages[index].data.get("noise"), dict):
            merged["noise"] = {**self.data.noise.model_dump(), **self.stages[index].data["noise"]}
        return DataConfig.model_validate(merged)


def selected_groups(stage: StageConfig, beside_adapter: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Groups of base weights that a stage trains, in canonical order.

    Args:
        beside_adapter: `lora.modules_to_save` in a stage that trains the adapter.

    Raises:
        ValueError: an unknown name, or nothing left to train.
    """
    chosen = {g for name in stage.train for g in expand_group(name, f"stage {stage.name!r}.train")}
    chosen |= {g for name in beside_adapter for g in expand_group(name, "lora.modules_to_save")}
    chosen -= {g for name in stage.freeze for g in expand_group(name, f"stage {stage.name!r}.freeze")}
    if not chosen and stage.lora != "train":
        raise ValueError(f"stage {stage.name!r} trains nothing: train={list(stage.train)} freeze={list(stage.freeze)}")
    return tuple(g for g in GROUPS_U2 if g in chosen)
