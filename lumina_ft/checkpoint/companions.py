"""What a trained model needs besides weights to be prompted as it was trained: tokenizer, codec, system prompts.

They travel inside the model directory, so a checkpoint can be moved, converted and sampled without its run or dataset.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from lumina_ft.data.codecs import CODEC_DIR
from lumina_ft.data.shards import read_meta
from lumina_ft.data.tokenizer import copy_tokenizer
from lumina_ft.errors import CheckpointError
from lumina_ft.models.json_files import write_json

SETTINGS_FILE = "sampling.json"


@dataclass(frozen=True)
class SamplingSettings:
    """How prompts were laid out in training.

    Attributes:
        system_prompts: per task.
        block_tokens: L, length of a text diffusion block.
    """

    system_prompts: dict[str, str]
    block_tokens: int


def write_companions(model_dir: Path, dataset: Path, block_tokens: int) -> None:
    """Complete a model directory from the dataset it was trained on.

    A tokenizer that came with the base model stays; codec and settings are those of this dataset.
    """
    if not (model_dir / "tokenizer.json").exists():
        copy_tokenizer(dataset / "tokenizer", model_dir)
    if (dataset / CODEC_DIR).is_dir():
        shutil.copytree(dataset / CODEC_DIR, model_dir / CODEC_DIR, dirs_exist_ok=True)
    settings = SamplingSettings(read_meta(dataset).system_prompts, block_tokens)
    write_json(model_dir / SETTINGS_FILE, asdict(settings))


def read_settings(model_dir: Path) -> SamplingSettings | None:
    """Settings of a model directory; None if it holds none, as a published checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = model_dir / SETTINGS_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return SamplingSettings(dict(values["system_prompts"]), int(values["block_tokens"]))
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"{path} — {err!r} — must hold system_prompts and block_tokens — delete it to use the defaults"
        ) from err
