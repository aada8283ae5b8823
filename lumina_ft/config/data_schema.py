"""Configuration of `lumina-ft data build`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lumina_ft.config.fields import Count, CountOrZero, Section

Task = Literal["text", "understand", "t2i"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, Path)) else value


class CodecConfig(Section):
    """How images become codes; `codec=pq` on the command line means `codec.kind=pq`."""

    kind: Literal["pq", "token-files"] = "pq"
    """`pq`: the built-in product quantiser; `token-files`: official .pkl/.pt files with indices and coords."""
    path: Path | None = None
    """A fitted `pq` codec to use; default: fit one on this build's images."""
    image_size: Count = 8
    """pq: images are resized to this square, in pixels."""
    patch_size: Count = 4
    """pq: pixels per patch side; the grid is image_size / patch_size squared."""
    codes_per_codebook: Count = 32
    """pq: k-means centres per codebook. token-files with the demo tokenizer: bound of the codes, 4096 if not set."""
    num_codebooks: Count = 8
    """pq: codes per patch."""
    channels: Literal["gray", "rgb"] = "rgb"
    """pq: colour of the images that are encoded and decoded."""
    fit_images: Count = 20000
    """pq: at most this many images are used to fit."""

    @model_validator(mode="after")
    def _grid(self) -> "CodecConfig":
        if self.image_size % self.patch_size:
            raise ValueError(f"codec.patch_size={self.patch_size} must divide codec.image_size={self.image_size}")
        return self


def _codec(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class BuildConfig(Section):
    """`lumina-ft data build [CONFIG] [key=value …]`: raw rows and images to packed-ready shards."""

    input: Annotated[tuple[Path, ...], BeforeValidator(_as_list), Field(min_length=1)]
    """JSONL file or files."""
    output: Path
    """Directory to write; must not exist unless `overwrite`."""
    format: Literal["auto", "messages", "pairs"] = "auto"
    """`messages`: OpenAI-style list of role/content; `pairs`: prompt/response. `auto`: as the first row looks."""
    task: Task | Literal["auto"] = "auto"
    """Task of every row; `auto`: the row's `task` field, else by its media (an image in the answer means t2i)."""
    media_dir: Path | None = None
    """Where relative image paths start; default: the directory of the input file."""
    codec: Annotated[CodecConfig, BeforeValidator(_codec)] = CodecConfig()
    tokenizer: str = "demo"
    """Tokenizer directory, or `demo`."""
    model_config_file: Path | None = None
    """`config.json` of the model whose ids and codebooks the rows must fit; default: the tokenizer's, or the demo's."""
    system_prompts: dict[Task, str] = {}
    """Override of the published system prompt of a task (spec §2)."""
    on_bad_row: Literal["error", "quarantine"] = "error"
    """Stop at the first bad row, or write it with file:line and reason to quarantine.jsonl and go on."""
    max_sample_tokens: Count = 8192
    """Longer samples are bad rows."""
    block_tokens: Count = 32
    """L, only used to compute sample lengths for the packing report."""
    overwrite: bool = False
    """Replace an existing dataset at `output`."""
    workers: CountOrZero = 1
    """Processes that read and encode rows; 0: one per core. The result doesn't depend on it."""
    seed: CountOrZero = 0
    """Drives the fit of the `pq` codec."""
