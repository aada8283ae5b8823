"""From what a user names to a `Sampler`: weights, adapter, tokenizer, codec and prompt layout are found and loaded.

A run directory stands for its newest complete checkpoint, and a checkpoint for its weights with its adapter.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from lumina_ft.adapters.files import read_adapter
from lumina_ft.adapters.layout import CONFIG_FILE as ADAPTER_CONFIG_FILE
from lumina_ft.adapters.lora import load_adapter
from lumina_ft.checkpoint.companions import SamplingSettings, read_settings
from lumina_ft.checkpoint.directory import STATE_FILE, Checkpoint, Skipped, checkpoints_dir, inspect, newest_checkpoint
from lumina_ft.data.codecs import CODEC_DIR, ImageCodec, load_codec
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.data.shards import read_meta
from lumina_ft.data.tokenizer import TextTokenizer, check_text_ids, load_tokenizer, text_ids
from lumina_ft.errors import CheckpointError, ConfigError, DataError
from lumina_ft.generate.sampler import Sampler
from lumina_ft.models.identity import model_identity
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.tokens import TokenSpec

_DEFAULT_BLOCK_TOKENS = 32
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class ModelSource:
    """What `--model`, `--adapter` and `--no-adapter` stand for.

    Attributes:
        model_dir: the weights, without the adapter where there is one.
        adapter_dir: PEFT directory to put on them, or None.
        companions: directories that may hold tokenizer, codec and settings. Of each the first one counts: what the
            model was trained with last. An adapter that is left out still says how to prompt, so that its effect alone
            is seen.
    """

    model_dir: Path
    adapter_dir: Path | None
    companions: tuple[Path, ...]


def locate_model(path: Path, *, adapter: Path | None = None, with_adapter: bool = True) -> ModelSource:
    """Resolve a run directory, one of its checkpoints, that checkpoint's `model/`, or any checkpoint directory.

    Args:
        path: a checkpoint brings its adapter; a directory of weights has none.
        adapter: PEFT LoRA directory to put on weights that have none of their own.
        with_adapter: False leaves out the checkpoint's adapter.

    Raises:
        CheckpointError: nothing of that kind, a run without a complete checkpoint, or one whose base is gone.
        ConfigError: there is no adapter to leave out, or more than one to choose from.
    """
    path = Path(path)
    if adapter is not None and not with_adapter:
        raise ConfigError(f"--no-adapter — and --adapter {adapter} — contradict each other — give one")
    model_dir, own = _weights_and_adapter(path)
    if not with_adapter and own is None:
        raise ConfigError(f"--no-adapter — model={path} — there is no adapter to leave out — remove the option")
    if adapter is not None and own is not None:
        raise ConfigError(
            f"--adapter — {adapter} — model={path} has an adapter of its own, {own}, and one can be on — pass "
            f"--model {model_dir}"
        )
    chosen = own if adapter is None else adapter
    companions = (model_dir,) if chosen is None else (chosen, model_dir)
    return ModelSource(model_dir, chosen if with_adapter else None, companions)


def _weights_and_adapter(path: Path) -> tuple[Path, Path | None]:
    if checkpoints_dir(path).is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(
                f"model={path} — has no complete checkpoint — a run is sampled from its newest one — train it further"
            )
        return newest.base_dir, newest.adapter_dir
    if (path / STATE_FILE).is_file():
        found = inspect(path, hashes=False)
        if isinstance(found, Skipped):
            raise CheckpointError(f"model={found} — must be a complete checkpoint — take another of the run")
        assert isinstance(found, Checkpoint)
        return found.base_dir, found.adapter_dir
    if (path / "config.json").is_file():
        return path, None
    if (path / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"model={path} — is an adapter, which changes the weights of a model — must be that model — pass the model "
            f"as --model, and --adapter {path}"
        )
    raise CheckpointError(
        f"model={path} — no config.json and no checkpoints/ — must be a run or a checkpoint directory — check the path"
    )


def load_sampler(
    path: Path,
    *,
    adapter: Path | None = None,
    with_adapter: bool = True,
    data: Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Sampler:
    """Load what `--model` names; see `locate_model` and `open_sampler`."""
    source = locate_model(path, adapter=adapter, with_adapter=with_adapter)
    return open_sampler(source, data=data, dtype=dtype, device=device)


def open_sampler(
    source: ModelSource, *, data: Path | None = None, dtype: torch.dtype | None = None, device: str | None = None
) -> Sampler:
    """Load a model with what belongs to it.

    Args:
        data: built dataset whose codec and system prompts to use; default: those that training left beside the
            weights, or the published prompts.
        dtype: of the weights; default: as stored.
        device: default: the GPU if there is one.

    Raises:
        CheckpointError: a damaged model or adapter, or an adapter that was trained on other weights.
        DataError: a tokenizer or codec that doesn't belong to the model.
    """
    model = load_model(source, dtype=dtype, device=device)
    spec = model.config.token_spec()
    tokenizer = _find_tokenizer(source, spec)
    found = next((settings for place in source.companions if (settings := read_settings(place))), None)
    settings = found or SamplingSettings(dict(SYSTEM_PROMPTS), _DEFAULT_BLOCK_TOKENS)
    prompts = settings.system_prompts
    if data is not None:
        prompts = prompts | read_meta(data).system_prompts
    own_places = tuple(place / CODEC_DIR for place in source.companions)
    codec = _find_codec(own_places, data, spec) if model.config.has_image else None
    places = own_places if data is None else (data / CODEC_DIR, *own_places)
    return Sampler(model, tokenizer, spec, codec, places, prompts, settings.block_tokens)


def load_model(source: ModelSource, *, dtype: torch.dtype | None = None, device: str | None = None) -> U2ForDiffusion:
    """The weights, with the adapter attached and unmerged, in eval mode.

    Raises:
        CheckpointError: a damaged model or adapter, or an adapter that was trained on other weights.
    """
    if source.adapter_dir is not None:
        _check_base(source.adapter_dir, source.model_dir)
    model = U2ForDiffusion.from_pretrained(source.model_dir, dtype=dtype)
    if source.adapter_dir is not None:
        load_adapter(model, source.adapter_dir)
    torch.nn.Module.to(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def _check_base(adapter: Path, base: Path) -> None:
    """On other weights of the same shapes an adapter gives answers that are wrong without a sign of it.

    Raises:
        CheckpointError: the adapter says what it was trained on, and it wasn't this.
    """
    trained_on = read_adapter(adapter).base
    if trained_on is None:
        return
    found = model_identity(base)
    if found.digest == trained_on.digest:
        return
    names = found.tensors.keys() | trained_on.tensors.keys()
    other = sorted(name for name in names if found.tensors.get(name) != trained_on.tensors.get(name))
    raise CheckpointError(
        f"{adapter} — {len(other)} of {len(names)} tensors of {base} are not those that it was trained on"
        f"{f', the first {other[0]}' if other else ''} — an adapter belongs to its base — pass that base as --model"
    )


def _find_tokenizer(source: ModelSource, spec: TokenSpec) -> TextTokenizer:
    places = [place for place in source.companions if (place / _TOKENIZER_FILE).is_file()]
    tokenizer = load_tokenizer(places[0] if places else source.model_dir)
    model_source = str(source.model_dir / "config.json")
    check_text_ids(text_ids(tokenizer), spec.text, directory=tokenizer.directory, model_source=model_source)
    return tokenizer


def _find_codec(places: tuple[Path, ...], data: Path | None, spec: TokenSpec) -> ImageCodec | None:
    """The codec that the model was trained with last, or the dataset's, after a check that it is the model's.

    Args:
        places: of the model's own codec; the first that exists counts.
        data: built dataset.

    Raises:
        DataError: it has other codebooks or more codes than the model, or the dataset's isn't the model's own.
    """
    own = next((place for place in places if place.is_dir()), None)
    given = None if data is None else data / CODEC_DIR
    place = given if given is not None and given.is_dir() else own
    if place is None:
        return None
    codec = load_codec(place)
    if codec.num_codebooks != spec.num_codebooks or codec.codes_per_codebook > spec.media.codebook_size:
        raise DataError(
            f"codec {place} — {codec.num_codebooks} codebooks of {codec.codes_per_codebook} codes — the model has "
            f"{spec.num_codebooks} of {spec.media.codebook_size} — use the codec of the training data"
        )
    if own is not None and place != own and load_codec(own).identity != codec.identity:
        raise DataError(
            f"codec {place} — is not the one in {own}, which the model was trained with — equal codes "
            "would mean other pixels — leave out --data, or pass the training data"
        )
    return codec
