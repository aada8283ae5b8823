"""Configuration of InternLumina-U2 and of its text-only LLaDA2-MoE ancestors (spec §1, M9)."""

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from lumina_ft.data.token_spec import model_table
from lumina_ft.errors import ConfigError, nearest
from lumina_ft.kernels import Kernels
from lumina_ft.tokens import TokenSpec

SHIPPED_CONFIGS = Path(__file__).parent / "configs"
MODEL_TYPES = ("llada2_moe", "llada2_moe_veomni")
"""`model_type` of the split and of the packed checkpoint layout."""

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "text_rows",
    "max_position_embeddings",
)
_IMAGE_COUNTS = ("num_codebooks", "image_embedding_rows", "image_head_classes", "ar_head_depth", "ar_head_heads")
# Keys with one supported value; the published code either ignores the key or has no other branch.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "norm_topk_prob": True,
}


class U2Config(PretrainedConfig):
    """Sizes and constants of a model. Field names are those of the published `config.json`; defaults are its values.

    Keys that the published file doesn't have: `text_rows`, `image_embedding_rows`, `image_head_classes`,
    `ar_head_depth`, `ar_head_heads` (constants in the published code), `text_ids` and `media_ids` (see `token_spec`).
    `num_codebooks: null` means a text-only model without any image part. Unknown keys are kept and written back.

    Raises:
        ConfigError: a value is of the wrong kind, unsupported, or doesn't fit another one.
    """

    model_type = "llada2_moe"

    vocab_size: int = 157184
    text_rows: int | None = None
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = None
    hidden_act: str = "silu"
    use_bias: bool = False
    use_qkv_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 600000.0
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 16384
    pad_token_id: int | None = 156892
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    output_dropout: float = 0.0
    initializer_range: float = 0.02
    first_k_dense_replace: int = 1
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int | None = 1
    moe_intermediate_size: int = 512
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    score_function: str = "sigmoid"
    router_dtype: str = "fp32"
    norm_topk_prob: bool = True
    moe_router_enable_expert_bias: bool = True
    num_codebooks: int | None = None
    codebook_size: int | None = None
    image_embedding_rows: int = 5010
    image_head_classes: int = 4096
    ar_head_depth: int = 6
    ar_head_heads: int = 8
    text_ids: dict[str, int] | None = None
    media_ids: dict[str, int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in ("rope_scaling", "rope_parameters"):
            rope = kwargs.pop(key, None)
            if rope and rope.get("rope_type", "default") != "default":
                raise ConfigError(f"{key} — {rope} — only plain rotary positions are supported — remove the key")
            self.rope_theta = (rope or {}).get("rope_theta", self.rope_theta)
        rotary_dim = kwargs.pop("rotary_dim", None)
        super().__post_init__(**kwargs)
        self.text_rows = self.vocab_size if self.text_rows is None else self.text_rows
        self._check_kinds(_COUNTS)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.has_image:
            self._check_kinds(_IMAGE_COUNTS)
            self.codebook_size = self.image_head_classes if self.codebook_size is None else self.codebook_size
        self._check_kinds(("head_dim",))
        self._check_constants()
        self._check_fits()
        if rotary_dim is not None and rotary_dim != self.rotary_dim:
            raise ConfigError(
                f"rotary_dim — {rotary_dim} — must be head_dim * partial_rotary_factor = {self.rotary_dim} — remove it"
            )

    @property
    def has_image(self) -> bool:
        """Whether the model has image tables, image heads and the codebook head."""
        return self.num_codebooks is not None

    @property
    def id_columns(self) -> int:
        """C: columns of `input_ids`; 1 in text-only models."""
        return 1 if self.num_codebooks is None else self.num_codebooks

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of each head; the rest stays as it is."""
        assert self.head_dim is not None
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    def token_spec(self) -> TokenSpec:
        """Special ids of this model: keys `text_ids` and `media_ids`, or the published ones for the published size.

        Raises:
            ConfigError: an id is missing or out of range.
        """
        return model_table(self.to_dict(), "config.json").spec

    @classmethod
    def load(cls, source: str | Path) -> "U2Config":
        """Read a configuration.

        Args:
            source: a JSON file, a directory with `config.json`, or the name of a shipped one such as `u2-tiny`.

        Raises:
            ConfigError: no such file or name, broken JSON, another model type, or an unsupported value.
        """
        path = _resolve(str(source))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} — {error} — must be a JSON object — repair the file") from error
        model_type = content.get("model_type") if isinstance(content, dict) else None
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"{path}: model_type — {model_type!r} — must be one of {', '.join(MODEL_TYPES)} — use a U2 checkpoint"
            )
        return cls.from_dict(content)

    def _check_kinds(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{key} — {value!r} — must be an integer of at least 1 — correct config.json")

    def _check_constants(self) -> None:
        for key in ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "partial_rotary_factor"):
            value = getattr(self, key)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{key} — {value!r} — must be a number above 0 — correct config.json")
        for key, supported in _FIXED.items():
            value = getattr(self, key)
            if value != supported:
                raise ConfigError(f"{key} — {value!r} — only {supported!r} is supported — use a checkpoint with it")
        # 0 would build shared experts of width zero in the published code; null is how it says "none".
        if self.num_shared_experts is not None and (
            not isinstance(self.num_shared_experts, int) or self.num_shared_experts < 1
        ):
            raise ConfigError(
                f"num_shared_experts — {self.num_shared_experts!r} — must be null or at least 1 — use null for none"
            )

    def _check_fits(self) -> None:
        assert self.head_dim is not None
        _divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)
        _divides("n_group", self.n_group, "num_experts", self.num_experts)
        group_size = self.num_experts // self.n_group
        _at_most("topk_group", self.topk_group, self.n_group, "n_group")
        _at_most(
            "num_experts_per_tok", self.num_experts_per_tok, self.topk_group * group_size, "experts in kept groups"
        )
        if self.topk_group < self.n_group and group_size < 2:
            raise ConfigError(
                f"n_group — {self.n_group} — a group is scored by its two best experts — use fewer groups"
            )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace — {self.first_k_dense_replace} — must be 0 to num_hidden_layers="
                f"{self.num_hidden_layers} — correct config.json"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor — {self.partial_rotary_factor} — rotates {self.rotary_dim} of "
                f"{self.head_dim} dims; must be an even number of them — correct config.json"
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < (self.text_rows or 0):
            raise ConfigError(
                f"pad_token_id — {self.pad_token_id} — must be below text_rows={self.text_rows} — correct it"
            )
        if self.has_image:
            _divides("ar_head_heads", self.ar_head_heads, "hidden_size", self.hidden_size)
            _at_most("image_head_classes", self.image_head_classes, self.image_embedding_rows, "image_embedding_rows")
            if self.codebook_size != self.image_head_classes:
                raise ConfigError(
                    f"codebook_size — {self.codebook_size} — must equal image_head_classes={self.image_head_classes} — "
                    "set both or remove codebook_size"
                )


def kernels_for(config: U2Config, choice: str = "auto", *, spread: bool = False) -> Kernels:
    """What a model of this configuration asks of its kernels.

    Args:
        choice: `model.kernels`. spread: whether ranks share the routed experts.

    Raises:
        ConfigError: an unknown choice.
    """
    assert config.head_dim is not None
    return Kernels(
        choice,
        hidden_size=config.hidden_size,
        expert_size=config.moe_intermediate_size,
        num_experts=config.num_experts if config.num_moe_layers else 0,
        head_dim=config.head_dim,
        heads_per_key=config.num_attention_heads // config.num_key_value_heads,
        spread=spread,
    )


def _resolve(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    shipped = {p.stem: p for p in SHIPPED_CONFIGS.glob("*.json")}
    if source in shipped:
        return shipped[source]
    raise ConfigError(
        f"model config — {source} — no such file or shipped name{nearest(source, shipped)} — shipped: "
        f"{', '.join(sorted(shipped))}"
    )


def _divides(name: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        raise ConfigError(f"{name} — {value} — must divide {whole_name}={whole} — correct config.json")


def _at_most(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise ConfigError(f"{name} — {value} — must be at most {limit} ({what}) — correct config.json")
