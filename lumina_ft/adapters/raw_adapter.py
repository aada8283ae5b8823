"""Adapter directories as verification reads them: parsed and scaled without `files.py`, `layout.py` or `targets.py`.

A mistake in how a merge reads an adapter can't hide here. Shape legend: E experts, O outputs, I inputs, r rank.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor

from lumina_ft.adapters.float_bits import Doubles, values_of
from lumina_ft.errors import RunError
from lumina_ft.models.hf_keys import CHANNEL_MASK

_PREFIX = "base_model.model."
_PART = re.compile(r"base_model\.model\.(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?")
_ON_PARAMETERS = re.compile(r"(?P<module>.+\.mlp\.experts)(?P<wrappers>(\.base_layer)*)")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Parameters of stacked experts in the order in which the model registers them, which is that of PEFT's wrappers."""


class Factors(NamedTuple):
    """One adapter's part of a matrix: sb [O, r] is weight * scale * B, a [r, I], magnitude [O] for DoRA."""

    sb: Doubles
    a: Doubles
    magnitude: Doubles | None


@dataclass
class RawAdapter:
    """An open adapter directory.

    Attributes:
        weight: factor in the sum.
        whole: native name -> key, of tensors that replace the base's.
    """

    directory: Path
    weight: float
    whole: dict[str, str] = field(default_factory=dict)
    _parts: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._config = json.loads((self.directory / "adapter_config.json").read_text(encoding="utf-8"))
        self._file = safe_open(self.directory / "adapter_model.safetensors", framework="pt")
        wrapped: dict[str, dict[int, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
        for key in self._file.keys():
            match = _PART.fullmatch(key)
            on_parameters = match and _ON_PARAMETERS.fullmatch(match[1])
            if match and on_parameters:
                depth = on_parameters["wrappers"].count(".base_layer")
                wrapped[on_parameters["module"]][depth].append((match[2], key))
            elif match:
                self._parts[f"{match[1]}.weight", match[2]] = key
            elif not key.endswith(CHANNEL_MASK):
                # The mask is constant: the output's is compared with the base's, or must be causal.
                self.whole[key.removeprefix(_PREFIX)] = key
        for module, by_depth in wrapped.items():
            self._name_wrappers(module, by_depth)

    def _name_wrappers(self, module: str, by_depth: dict[int, list[tuple[str, str]]]) -> None:
        """Say which parameter each wrapper of a module is for: the first one that PEFT wraps ends up innermost."""
        chosen = [f"{module}.{projection}" for projection in _PROJECTIONS]
        entries = self._config.get("target_parameters") or []
        chosen = [name for name in chosen if any(f".{name}".endswith(f".{entry}") for entry in entries)]
        if sorted(by_depth) != list(range(len(chosen))):
            raise RunError(
                f"verification — {self.directory} — {module} has tensors of {len(by_depth)} wrappers, and "
                f"target_parameters name {len(chosen)} of its parameters — each has one — nothing is kept; report this "
                "as a defect"
            )
        for depth, name in enumerate(reversed(chosen)):
            for part, key in by_depth[depth]:
                self._parts[name, part] = key

    @property
    def names(self) -> set[str]:
        """Native names of every tensor that the adapter changes."""
        return {name for name, _ in self._parts} | set(self.whole)

    def adapts(self, name: str) -> bool:
        """Whether a low-rank update belongs to a tensor."""
        return (name, "A") in self._parts

    def whole_tensor(self, name: str) -> Tensor:
        """Tensor of `modules_to_save`."""
        return self._file.get_tensor(self.whole[name])

    def factors(self, name: str) -> Factors:
        """This adapter's part of a matrix."""
        a, b = (values_of(self._file.get_tensor(self._parts[name, part])) for part in "AB")
        key = self._parts.get((name, "magnitude_vector"))
        magnitude = None if key is None else values_of(self._file.get_tensor(key)).reshape(-1)
        return Factors(b * (self.weight * self._scale(name.removesuffix(".weight"), a.shape[0])), a, magnitude)

    def expert_factors(self, name: str, expert: int, num_experts: int) -> Factors:
        """This adapter's part of one expert's matrix.

        PEFT stores A [E r, I], an expert's rows together, and B [O, r E], in which an expert's columns are E apart.
        """
        all_a, all_b = (self._file.get_tensor(self._parts[name, part]) for part in "AB")
        rank = all_a.shape[0] // num_experts
        a = values_of(all_a[expert * rank : (expert + 1) * rank])
        b = values_of(all_b[:, expert::num_experts].contiguous())
        return Factors(b * (self.weight * self._scale(name, rank)), a, None)

    def _scale(self, module: str, rank: int) -> float:
        alphas = self._config.get("alpha_pattern") or {}
        own = [value for key, value in alphas.items() if re.fullmatch(rf"(.*\.)?({key})", module)]
        alpha = own[0] if own else self._config["lora_alpha"]
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
