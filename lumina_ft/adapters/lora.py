"""LoRA, rsLoRA, DoRA and PiSSA on linear layers: PEFT's layers, put into a model in place.

The model keeps its class and its own code; an adapted layer's weight is then called `<layer>.base_layer.weight`, the
adapter's `<layer>.lora_A.default.weight` [r, I], `lora_B` [O, r] and, for DoRA, `lora_magnitude_vector` [O]. PEFT's
initialisation is replaced: values here depend on (seed, layer) alone, and weights that ZeRO-3 has partitioned are
gathered.

Shape legend: O outputs, I inputs, r rank.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lumina_ft.adapters.delta import delta_cosine, lora_delta, merge_weight, round_to
from lumina_ft.adapters.files import ADAPTER_NAME, LoraFile, read_adapter
from lumina_ft.adapters.targets import Target, plan_targets, short_names
from lumina_ft.config.groups import ADAPTER_MODULE_GROUPS
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import CheckpointError, ConfigError, nearest
from lumina_ft.models.groups import base_name, group_of, is_adapter_name
from lumina_ft.parallel.zero3 import full_shape, gathered, is_partitioned, reads_also, write_tensor

_SCALE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Adapter:
    """An adapter that is attached to a model.

    Attributes:
        targets: adapted layers, in the model's order.
        dropout: that it is trained with.
        use_rslora: scales are alpha / sqrt(r).
        start: PiSSA: layer -> (A0 [r, I], B0 [O, r]) on the CPU; the model's base weight is W - scale B0 A0. Empty
            if the weights in the model are those that the adapter's base has on disk.
    """

    targets: tuple[Target, ...]
    dropout: float
    use_rslora: bool
    start: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def can_store(self, changed: Collection[str]) -> bool:
        """Whether an adapter directory can hold these groups of base weights beside the adapter.

        It holds whole modules, and none that is adapted: PEFT would put no adapter on such a module.
        """
        adapted = {group_of(f"{target.module}.weight") for target in self.targets}
        return all(group in ADAPTER_MODULE_GROUPS and group not in adapted for group in changed)


class MergedWeight(NamedTuple):
    """weight: [O, I] whole, in the base's dtype. cosine: how much of the update survived rounding, see `delta`."""

    weight: Tensor
    cosine: float


def attach_adapter(
    model: nn.Module,
    cfg: LoraConfig,
    *,
    seed: int,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    frozen: bool = False,
    on_layer: Callable[[], object] | None = None,
) -> Adapter:
    """Put an adapter on a model that has its weights: a new one, or one that an earlier stage has left. Collective.

    Under ZeRO-3 the adapter's own parameters stay whole until the engine partitions them. On the meta device only
    names and shapes come to be.

    Args:
        seed: of the initial values.
        source: adapter directory to continue; its whole modules are loaded too.
        dtype: of the forward pass; default: of the model's weights. Values that start from weights start from weights
            in this dtype, so that they don't depend on the ZeRO stage, which decides when weights are cast.
        frozen: the adapter isn't trained, so its input isn't dropped out.
        on_layer: called after each layer of a new adapter; PiSSA decomposes for seconds in each.

    Raises:
        ConfigError: see `plan_targets`; or DoRA on a layer with rows of zeros.
        CheckpointError: the directory holds another adapter than the one configured.
    """
    targets = plan_targets(model, cfg)
    _inject(model, targets, dropout=0.0 if frozen else cfg.dropout)
    adapter = Adapter(targets, cfg.dropout, cfg.use_rslora)
    if any(param.is_meta for param in model.parameters()):
        return adapter
    dtype = dtype or next(model.parameters()).dtype
    if source is None:
        start = _initialise(model, targets, cfg, seed=seed, dtype=dtype, on_layer=on_layer)
    else:
        file = read_adapter(source)
        load_modules(model, file)
        start = _continue(model, targets, cfg, file, dtype)
    return Adapter(targets, cfg.dropout, cfg.use_rslora, start)


def load_adapter(model: nn.Module, directory: Path) -> Adapter:
    """Put any PEFT LoRA directory on a model, unmerged, and load its whole modules. For sampling.

    Raises:
        CheckpointError: see `read_adapter`; or it adapts layers, or holds modules, that the model doesn't have.
    """
    file = read_adapter(directory)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets: list[Target] = []
    for name, info in file.targets.items():
        layer = linears.get(name)
        if layer is None or (layer.in_features, layer.out_features) != (info.in_features, info.out_features):
            found = "absent" if layer is None else f"{layer.in_features} x {layer.out_features}"
            raise CheckpointError(
                f"{file.path} — {name}: {info.in_features} x {info.out_features} in the adapter, {found} in the model"
                f"{nearest(name, linears) if layer is None else ''} — the adapter is of another model — "
                "give it the base that it was trained on"
            )
        sizes = (info.in_features, info.out_features, info.rank)
        targets.append(Target(name, name, *sizes, info.alpha, info.scale, file.use_dora))
    _inject(model, tuple(targets), dropout=file.dropout)
    load_modules(model, file)
    for target in targets:
        _write_pair(model, target, file)
    return Adapter(tuple(targets), file.dropout, use_rslora=False)


def load_modules(model: nn.Module, file: LoraFile) -> None:
    """Load the whole modules that an adapter directory holds beside the adapter. Collective under ZeRO-3.

    Raises:
        CheckpointError: the model has no such tensor, or one of another shape.
    """
    own = {base_name(n): t for n, t in model.state_dict(keep_vars=True).items() if not is_adapter_name(n)}
    for name, shape in file.modules.items():
        found = tuple(full_shape(own[name])) if name in own else "absent"
        if found != shape:
            raise CheckpointError(
                f"{file.path} — {name}: {shape} in the adapter, {found} in the model — the adapter is of another model "
                "— give it the base that it was trained on"
            )
        write_tensor(own[name], file.module_tensor(name))


def merged_weight(model: nn.Module, target: Target) -> MergedWeight:
    """W + scale B A of one layer (DoRA: rescaled), whole, computed in float64 and rounded once. Collective."""
    layer: Any = model.get_submodule(target.module)
    parts = [layer.base_layer.weight, layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight]
    if target.use_dora:
        parts.append(layer.lora_magnitude_vector[ADAPTER_NAME].weight)
    with torch.no_grad(), gathered(parts):
        weight, a, b, *rest = (part.detach() for part in parts)
        magnitude = rest[0] if rest else None
        delta = lora_delta(a, b, target.scale)
        merged = merge_weight(weight, [delta], magnitude=magnitude)
        if magnitude is not None:
            delta = merge_weight(weight, [delta], magnitude=magnitude, dtype=torch.float64) - weight.double()
        return MergedWeight(merged, delta_cosine(weight, merged, delta))


def merged_tensors(model: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Tensor, float | None]]:
    """Every tensor of the model with the adapter merged into it, whole, one at a time. Collective: iterate to the end.

    Yields:
        (native name, tensor, see `MergedWeight.cosine`, None for tensors without an adapter).
    """
    targets = {f"{target.module}.weight": target for target in adapter.targets}
    for name, tensor in model.state_dict(keep_vars=True).items():
        native = base_name(name)
        if is_adapter_name(name):
            continue
        if native in targets:
            merged = merged_weight(model, targets[native])
            yield native, merged.weight, merged.cosine
        else:
            with gathered([tensor]):
                yield native, tensor.detach(), None


def _inject(model: nn.Module, targets: tuple[Target, ...], *, dropout: float) -> None:
    """Put PEFT's layers in place; their values are arbitrary afterwards."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    by_name = {target.module: target for target in targets}
    rank = Counter(target.rank for target in targets).most_common(1)[0][0]
    options: dict[str, Any] = {
        "r": rank,
        "lora_dropout": dropout,
        "target_modules": list(by_name),
        # Anchored: PEFT's patterns are regular expressions.
        "rank_pattern": {f"^{target.module}$": target.rank for target in targets if target.rank != rank},
        # Scales are set below, so that they are exactly the planned ones.
        "lora_alpha": 1,
    }
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(PeftLoraConfig(**options), model, adapter_name=ADAPTER_NAME)
        layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
        assert set(layers) == set(by_name), f"PEFT chose {short_names(layers, layers)}"
        if targets[0].use_dora:
            # PEFT reads the base weight here, and gathers it under Hugging Face's own DeepSpeed configuration only.
            dora = PeftLoraConfig(use_dora=True, **options)
            for name, layer in layers.items():
                with gathered(layer.base_layer.parameters()):
                    layer.update_layer(ADAPTER_NAME, by_name[name].rank, lora_alpha=1, config=dora)
            for layer in layers.values():
                if is_partitioned(layer.base_layer.weight):
                    read = (*layer.base_layer.parameters(), layer.lora_A[ADAPTER_NAME].weight)
                    reads_also(layer.lora_magnitude_vector[ADAPTER_NAME], read)
    for name, layer in layers.items():
        layer.scaling[ADAPTER_NAME] = by_name[name].scale


def _initialise(
    model: nn.Module,
    targets: tuple[Target, ...],
    cfg: LoraConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    on_layer: Callable[[], object] | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Initial values of a new adapter; returns `Adapter.start`."""
    start: dict[str, tuple[Tensor, Tensor]] = {}
    for target in targets:
        layer: Any = model.get_submodule(target.module)
        # One 32-bit hash of both: torch's CPU generator ignores the higher bits of a seed.
        own_seed = zlib.crc32(f"{seed} lora {target.module}".encode())
        if cfg.init.startswith("pissa"):
            with torch.no_grad(), gathered([layer.base_layer.weight]):
                weight = layer.base_layer.weight.detach().to(dtype)
                a, b = _principal_pair(weight, target, cfg.init, own_seed)
            start[target.module] = (a.cpu(), b.cpu())
            _subtract_start(layer, target, start[target.module], dtype)
        else:
            generator = torch.Generator().manual_seed(own_seed)
            shape = (target.rank, target.in_features)
            if cfg.init == "gaussian":
                a = torch.randn(shape, generator=generator) / target.rank
            else:
                # Kaiming-uniform with a = sqrt(5), as nn.Linear and PEFT begin.
                a = (2 * torch.rand(shape, generator=generator) - 1) / target.in_features**0.5
            b = torch.zeros(target.out_features, target.rank)
        write_tensor(layer.lora_A[ADAPTER_NAME].weight, a)
        write_tensor(layer.lora_B[ADAPTER_NAME].weight, b)
        if target.use_dora:
            _measure_rows(layer, target, dtype)
        if on_layer is not None:
            on_layer()
    return start


def _measure_rows(layer: Any, target: Target, dtype: torch.dtype) -> None:
    """Initial magnitudes: the norm of each row of W + scale B A, as PEFT's forward computes it.

    Raises:
        ConfigError: a row of zeros, which has no direction: DoRA would divide 0 by 0.
    """
    magnitude = layer.lora_magnitude_vector[ADAPTER_NAME]
    with torch.no_grad(), gathered([layer.base_layer.weight]):
        update = layer.lora_B[ADAPTER_NAME].weight.to(dtype) @ layer.lora_A[ADAPTER_NAME].weight.to(dtype)
        weight = layer.base_layer.weight.detach().to(dtype)
        norms = magnitude.get_weight_norm(weight, update, target.scale)
    if not bool(norms.all()):
        raise ConfigError(
            f"lora.use_dora — {target.module} — has rows of zeros, whose direction DoRA can't train (fresh modulation "
            "layers of the codebook head start so) — take it out of lora.targets, or set use_dora: false"
        )
    write_tensor(magnitude.weight, norms)


def _principal_pair(weight: Tensor, target: Target, init: str, seed: int) -> tuple[Tensor, Tensor]:
    """PiSSA (arXiv:2404.02948): A0 = sqrt(S / scale) V^T, B0 = U sqrt(S / scale) of the r largest singular values.

    Then scale B0 A0 is the best approximation of W that has rank r. Decompositions may differ in their last bits
    between machines. Rank 0's count: the engine gives every rank its adapter and base, and it writes the adapter.

    Args:
        weight: [O, I] in the dtype of the forward pass, which A0 and B0 get too.
    """
    if init == "pissa":
        u, s, vh = torch.linalg.svd(weight.float(), full_matrices=False)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(weight.float(), target.rank, niter=int(init.rpartition("_")[2]))
        vh = v.T
    root = (s[: target.rank] / target.scale).sqrt()
    return (root.unsqueeze(1) * vh[: target.rank]).to(weight.dtype), (u[:, : target.rank] * root).to(weight.dtype)


def _subtract_start(layer: Any, target: Target, start: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Make the base weight the residual W - scale B0 A0, rounded once from float64: the same bits every time."""
    weight = layer.base_layer.weight
    with torch.no_grad(), gathered([weight]):
        whole = weight.detach().to(dtype).double()
        a0, b0 = (tensor.to(whole.device) for tensor in start)
        residual = round_to(whole - lora_delta(a0, b0, target.scale), dtype)
    write_tensor(weight, residual)


def _continue(
    model: nn.Module, targets: tuple[Target, ...], cfg: LoraConfig, file: LoraFile, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of an adapter that a run has written; returns `Adapter.start`."""
    _check_same(targets, cfg, file)
    start: dict[str, tuple[Tensor, Tensor]] = {}
    for target in targets:
        if file.targets[target.module].rank == target.rank:
            _write_pair(model, target, file)
            continue
        layer: Any = model.get_submodule(target.module)
        pair, rank = file.pair(target.module), target.rank
        start[target.module] = (pair.a[rank:].to(dtype).clone(), -pair.b[:, rank:].to(dtype))
        _subtract_start(layer, target, start[target.module], dtype)
        _write_pair(model, target, file)
    return start


def _check_same(targets: tuple[Target, ...], cfg: LoraConfig, file: LoraFile) -> None:
    """The directory's adapter must be the configured one."""

    def differ(what: str, stored: Any, wanted: Any) -> CheckpointError:
        return CheckpointError(
            f"{file.path} — {what}: {stored} in the adapter, {wanted} in the configuration — a stage continues the "
            "adapter as it was trained — restore the lora section, or start a new run"
        )

    names = {target.module for target in targets}
    if names != set(file.targets):
        odd = sorted(names ^ set(file.targets))
        where = "adapted" if odd[0] in file.targets else "not adapted"
        raise differ(odd[0], where, "not adapted" if where == "adapted" else "adapted")
    if file.use_dora != cfg.use_dora:
        raise differ("use_dora", file.use_dora, cfg.use_dora)
    pissa = cfg.init.startswith("pissa")
    doubled = pissa and all(file.targets[target.module].rank == 2 * target.rank for target in targets)
    for target in targets:
        info = file.targets[target.module]
        rank = info.rank // 2 if doubled else info.rank
        if rank != target.rank:
            raise differ(f"{target.module}: rank", rank, target.rank)
        if abs(info.scale - target.scale) > _SCALE_TOLERANCE * target.scale:
            raise differ(f"{target.module}: scale", info.scale, target.scale)


def _write_pair(model: nn.Module, target: Target, file: LoraFile) -> None:
    """Fill one layer's adapter from a file; of a PiSSA pair, the trained half."""
    layer: Any = model.get_submodule(target.module)
    pair = file.pair(target.module)
    write_tensor(layer.lora_A[ADAPTER_NAME].weight, pair.a[: target.rank])
    write_tensor(layer.lora_B[ADAPTER_NAME].weight, pair.b[:, : target.rank])
    if pair.magnitude is not None:
        write_tensor(layer.lora_magnitude_vector[ADAPTER_NAME].weight, pair.magnitude)
