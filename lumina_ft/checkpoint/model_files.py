"""What goes into a checkpoint's `model/`: whole weights, with or without the adapter, and the files around them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lumina_ft.adapters.lora import Adapter, merged_weight
from lumina_ft.checkpoint.companions import write_companions
from lumina_ft.data.tokenizer import copy_tokenizer
from lumina_ft.models.groups import base_name, is_adapter_name
from lumina_ft.models.hf_keys import MODEL_TYPES
from lumina_ft.models.identity import BaseIdentity, model_identity
from lumina_ft.models.init import initial_value
from lumina_ft.models.json_files import write_json
from lumina_ft.models.native import NativeReader
from lumina_ft.models.tensor_files import TensorSpec
from lumina_ft.models.weights import CONFIG_FILE, carry_files, export_config
from lumina_ft.parallel.expert_parallel import sharing_of
from lumina_ft.parallel.zero3 import full_shape, is_partitioned, whole


@dataclass(frozen=True)
class ModelFiles:
    """Where the files that belong to a model besides its weights come from.

    Attributes:
        source_dir: model that the stage started from (config keys, code, tokenizer); None for random weights.
        dataset: built dataset of the stage: codec, system prompts, and the tokenizer where `source_dir` has none.
        block_tokens: L of the stage.
        seed: of random weights.
    """

    source_dir: Path | None
    dataset: Path
    block_tokens: int
    seed: int = 0

    def complete_model(self, model: PreTrainedModel, folder: Path) -> None:
        """Write config, code, tokenizer, codec and settings of a model directory whose weights are there."""
        config = export_config(model.config, next(model.parameters()).dtype, self.source_dir)
        write_json(folder / CONFIG_FILE, {**config, "model_type": MODEL_TYPES["packed"]})
        if self.source_dir is not None:
            carry_files(self.source_dir, folder)
        write_companions(folder, self.dataset, self.block_tokens)

    def complete_adapter(self, folder: Path) -> None:
        """Write tokenizer, codec and settings into an adapter directory, so that it needs just its base."""
        if self.source_dir is not None:
            copy_tokenizer(self.source_dir, folder)
        write_companions(folder, self.dataset, self.block_tokens)

    def original(self, name: str, shape: tuple[int, ...], model: PreTrainedModel) -> Tensor:
        """A weight as it was before the stage, in the dtype of its file or as drawn; [shape]."""
        if self.source_dir is None:
            return initial_value(name, torch.Size(shape), std=model.config.initializer_range, seed=self.seed)
        with NativeReader(self.source_dir) as reader:
            return reader.rows(name, slice(0, shape[0])).clone()


class WholeWeights:
    """The weights of a model, as a model directory holds them: native names, no adapter.

    Args:
        adapter: attached to the model, if there is one.
        merge: give the adapted weights with the adapter merged into them; else as they were without it.

    Attributes:
        specs: shape and dtype of every persistent tensor.
        lowest: smallest cosine of a merged update so far, and the tensor's name; see `adapters.delta.delta_cosine`.
    """

    def __init__(self, model: PreTrainedModel, files: ModelFiles, adapter: Adapter | None, *, merge: bool) -> None:
        self._model = model
        self._files = files
        self._merge = merge
        self._start = adapter.start if adapter else {}
        self._targets = {target.weight: target for target in adapter.targets} if adapter else {}
        state = model.state_dict(keep_vars=True)
        self._tensors: dict[str, Any] = {base_name(n): t for n, t in state.items() if not is_adapter_name(n)}
        self.specs = {name: TensorSpec(tuple(full_shape(t)), t.dtype) for name, t in self._tensors.items()}
        self.lowest: tuple[float, str] | None = None

    def take(self, name: str, *, wanted: bool) -> Tensor | None:
        """One whole tensor where it is wanted, unchanged by what follows. Collective."""
        tensor, target = self._tensors[name], self._targets.get(name)
        if target is not None and self._merge:
            merged = merged_weight(self._model, target)
            self.lowest = min(self.lowest or (2.0, ""), (merged.cosine, name))
            return merged.weight if wanted else None
        assert not self.is_replaced(name), f"the model holds a residual of {name}"
        with whole([tensor]) as (value,):
            # Of spread experts the value is a new tensor already.
            borrowed = is_partitioned(tensor) and sharing_of(tensor) is None
            return value.to("cpu", copy=borrowed) if wanted else None

    def is_replaced(self, name: str) -> bool:
        """PiSSA: the model holds a residual of this weight, and `original` the whole of it."""
        target = self._targets.get(name)
        return target is not None and not self._merge and target.module in self._start

    def original(self, name: str) -> Tensor:
        """A weight as it was before PiSSA took its principal part out. Not collective.

        Raises:
            CheckpointError, OSError: the model that the stage started from is gone or damaged.
        """
        spec = self.specs[name]
        return self._files.original(name, spec.shape, self._model).to(spec.dtype)


@cache
def base_identity(directory: Path) -> BaseIdentity:
    """Identity of a model directory that doesn't change while this process lives; reads it once."""
    return model_identity(directory)


def adapter_bytes(model: PreTrainedModel, adapter: Adapter, modules: Mapping[str, TensorSpec]) -> int:
    """At most so many bytes an adapter directory takes; a PiSSA pair is stored with twice its rank."""
    factor = 2 if adapter.start else 1
    own = (p for name, p in model.named_parameters() if is_adapter_name(name))
    return factor * sum(full_shape(p).numel() * p.itemsize for p in own) + sum(s.num_bytes for s in modules.values())
