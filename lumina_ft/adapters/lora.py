"""LoRA, rsLoRA, DoRA and PiSSA on linear layers and LoRA on routed experts, put into a model in place.

Linear layers become PEFT's layers: the model keeps its class and its own code; an adapted layer's weight is then called
`<layer>.base_layer.weight`, the adapter's `<layer>.lora_A.default.weight` [r, I], `lora_B` [O, r] and, for DoRA,
`lora_magnitude_vector` [O]. Routed experts compute their adapters themselves (PEFT's way merges all of them into a copy
of the weights in every pass): `<parameter>_lora_A` [E, r, I] and `<parameter>_lora_B` [E, O, r], spread over ranks as
the experts are. Values here depend on (seed, target) alone, not on ranks, and weights that ZeRO-3 has partitioned are
gathered.

Shape legend: E experts, O outputs, I inputs, r rank.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lumina_ft.adapters.delta import change_sums, cosine_of, delta_cosine, lora_delta, merge_weight
from lumina_ft.adapters.files import LoraFile, read_adapter
from lumina_ft.adapters.initial import initialise, subtract_start
from lumina_ft.adapters.live import ADAPTER_NAME, live_pair
from lumina_ft.adapters.targets import Target, adaptable, plan_targets, short_names
from lumina_ft.config.groups import ADAPTER_MODULE_GROUPS
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.errors import CheckpointError, nearest
from lumina_ft.models.experts import PackedExperts
from lumina_ft.models.groups import base_name, group_of, is_adapter_name
from lumina_ft.models.loss_head import LossHead
from lumina_ft.parallel.expert_parallel import gather_experts, sharing_of
from lumina_ft.parallel.zero3 import full_shape, gathered, is_partitioned, reads_also, whole, write_tensor

_SCALE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Adapter:
    """An adapter that is attached to a model.

    Attributes:
        targets: what is adapted, in the model's order.
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
        adapted = {group_of(target.weight) for target in self.targets}
        return all(group in ADAPTER_MODULE_GROUPS and group not in adapted for group in changed)


class MergedWeight(NamedTuple):
    """weight: [O, I] or [E, O, I], whole, in the base's dtype. cosine: how much of the update survived rounding."""

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
        start = initialise(model, targets, cfg, seed=seed, dtype=dtype, on_layer=on_layer)
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
    sites = adaptable(model)
    targets: list[Target] = []
    for name, info in file.targets.items():
        sizes = (info.in_features, info.out_features, info.num_experts)
        if sites.get(name) != sizes:
            found = sites.get(name)
            raise CheckpointError(
                f"{file.path} — {name}: {_size(*sizes)} in the adapter, {_size(*found) if found else 'absent'} in the "
                f"model{nearest(name, sites) if found is None else ''} — the adapter is of another model — "
                "give it the base that it was trained on"
            )
        pair = (info.rank, info.alpha, info.scale)
        targets.append(Target(name, name, *sizes[:2], *pair, file.use_dora, info.num_experts))
    places = {name: place for place, name in enumerate(sites)}
    targets.sort(key=lambda target: places[target.module])
    _inject(model, tuple(targets), dropout=file.dropout)
    load_modules(model, file)
    for target in targets:
        _write_pair(model, target, file)
    return Adapter(tuple(targets), file.dropout, file.use_rslora)


def _size(in_features: int, out_features: int, num_experts: int) -> str:
    return f"{num_experts} experts of " * bool(num_experts) + f"{in_features} x {out_features}"


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
    """W + scale B A of one target (DoRA: rescaled), whole, computed in float64 and rounded once. Collective."""
    weight, a, b, magnitude = live_pair(model, target)
    with torch.no_grad(), gathered([weight, a, b, *([] if magnitude is None else [magnitude])]):
        if target.num_experts:
            return _merged_experts(weight, a, b, target.scale)
        weight, a, b = weight.detach(), a.detach(), b.detach()
        delta = lora_delta(a, b, target.scale)
        merged = merge_weight(weight, [delta], magnitude=magnitude)
        if magnitude is not None:
            delta = merge_weight(weight, [delta], magnitude=magnitude, dtype=torch.float64) - weight.double()
        return MergedWeight(merged, delta_cosine(weight, merged, delta))


def _merged_experts(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> MergedWeight:
    """Each rank merges its own experts, one by one; all get the whole result. Arguments are of this rank's experts."""
    merged, sums = torch.empty_like(weight), torch.zeros(1, 3, dtype=torch.float64, device=weight.device)
    for expert in range(weight.shape[0]):
        delta = lora_delta(a[expert], b[expert], scale)
        merged[expert] = merge_weight(weight[expert], [delta])
        sums += torch.tensor(change_sums(weight[expert], merged[expert], delta), dtype=sums.dtype, device=sums.device)
    experts = sharing_of(weight)
    if experts is not None:
        merged, sums = gather_experts(merged, experts), gather_experts(sums, experts)
    return MergedWeight(merged, cosine_of(*sums.sum(0).tolist()))


def merged_tensors(model: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Tensor, float | None]]:
    """Every tensor of the model with the adapter merged into it, whole, one at a time. Collective: iterate to the end.

    Yields:
        (native name, tensor, see `MergedWeight.cosine`, None for tensors without an adapter).
    """
    targets = {target.weight: target for target in adapter.targets}
    for name, tensor in model.state_dict(keep_vars=True).items():
        native = base_name(name)
        if is_adapter_name(name):
            continue
        if native in targets:
            merged = merged_weight(model, targets[native])
            yield native, merged.weight, merged.cosine
        else:
            with whole([tensor]) as (value,):
                yield native, value, None


def _inject(model: nn.Module, targets: tuple[Target, ...], *, dropout: float) -> None:
    """Put the adapter's parameters in place; their values are arbitrary afterwards. The base is frozen."""
    layers = [target for target in targets if not target.num_experts]
    if layers:
        _inject_layers(model, layers, dropout=dropout)
    for target in targets:
        if target.num_experts:
            block, _, projection = target.module.rpartition(".")
            experts = model.get_submodule(block)
            assert isinstance(experts, PackedExperts)
            experts.add_lora(projection, rank=target.rank, scale=target.scale, dropout=dropout)
    for name, param in model.named_parameters():
        param.requires_grad_(is_adapter_name(name))


def _inject_layers(model: nn.Module, targets: Sequence[Target], *, dropout: float) -> None:
    """Put PEFT's layers in place."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    from lumina_ft.adapters.adapted_head import AdaptedHead

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
        config = PeftLoraConfig(**options)
        config._register_custom_module({LossHead: AdaptedHead})
        inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
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
        if getattr(layer, "computes_loss", False) and is_partitioned(layer.base_layer.weight):
            reads_also(layer.base_layer, (layer.lora_B[ADAPTER_NAME].weight,))


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
        pair, rank = file.pair(target.module), target.rank
        start[target.module] = (pair.a[rank:].to(dtype).clone(), -pair.b[:, rank:].to(dtype))
        subtract_start(live_pair(model, target).weight, target, start[target.module], dtype)
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
        sizes = [(x.in_features, x.out_features, x.num_experts) for x in (info, target)]
        if sizes[0] != sizes[1]:
            raise differ(target.module, _size(*sizes[0]), _size(*sizes[1]))
        rank = info.rank // 2 if doubled else info.rank
        if rank != target.rank:
            raise differ(f"{target.module}: rank", rank, target.rank)
        if abs(info.scale - target.scale) > _SCALE_TOLERANCE * target.scale:
            raise differ(f"{target.module}: scale", info.scale, target.scale)


def _write_pair(model: nn.Module, target: Target, file: LoraFile) -> None:
    """Fill one target's adapter from a file; of a PiSSA pair, the trained half."""
    live, pair = live_pair(model, target), file.pair(target.module)
    write_tensor(live.a, pair.a[..., : target.rank, :])
    write_tensor(live.b, pair.b[..., : target.rank])
    if live.magnitude is not None and pair.magnitude is not None:
        write_tensor(live.magnitude, pair.magnitude)
