"""Configuration of adapters."""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from lumina_ft.config.fields import BelowOne, Count, Positive, Section, number
from lumina_ft.config.groups import ADAPTER_MODULE_GROUPS, expand_group


class LoraConfig(Section):
    """Low-rank adapters through PEFT. With this section, stages train the adapter unless they say `lora: off`."""

    rank: Count = 16
    """r: inner dimension of every adapter pair, of each routed expert too. Multiples of 8 run fastest on GPUs."""
    alpha: Positive = 32.0
    """Scale of the update: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("attention", "dense_mlp", "shared_experts")
    """What to adapt: group names, or names as PEFT takes them (a dotted suffix, as `attention.dense`). `experts`, or
    `experts.gate_proj` and so on, gives every routed expert a pair of its own. One that matches nothing is an error."""
    dropout: BelowOne = 0.0
    """Dropout of the adapter's input, drawn from (seed, step, pack). A directory with adapted experts says 0, because
    PEFT knows no dropout there."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps large ranks learning (arXiv:2312.03732)."""
    use_dora: bool = False
    """Train magnitude and direction apart (arXiv:2402.09353). Not with routed experts."""
    init: Annotated[str, Field(pattern=r"^(default|gaussian|pissa|pissa_niter_[1-9]\d*)$")] = "default"
    """`default` and `gaussian` start from a zero update; `pissa` from the principal components of the weights
    (arXiv:2404.02948), `pissa_niter_16` with a fast approximate decomposition. PiSSA isn't for routed experts."""
    rank_pattern: dict[str, Count] = {}
    """Ranks of single targets, named as in `targets`."""
    alpha_pattern: dict[str, Positive] = {}
    """Alphas of single targets, named as in `targets`."""
    lr_ratio: Annotated[float, BeforeValidator(number), Field(ge=1.0)] = 1.0
    """LoRA+: learning rate of the B matrices as a multiple of the A matrices' (arXiv:2402.12354)."""
    modules_to_save: tuple[str, ...] = ()
    """Groups or aliases trained in full in every stage that trains the adapter, and stored in its directory:
    embeddings, image projection and heads."""

    @model_validator(mode="after")
    def _storable(self) -> "LoraConfig":
        for name in self.modules_to_save:
            for group in expand_group(name, "lora.modules_to_save"):
                if group not in ADAPTER_MODULE_GROUPS:
                    raise ValueError(
                        f"lora.modules_to_save: {name!r} can't be stored in an adapter, which holds whole modules "
                        f"({', '.join(ADAPTER_MODULE_GROUPS)}); train it with stages.N.train instead"
                    )
        return self
