"""An estimate of the most memory that a rank of a stage takes at one moment: arithmetic over sizes, nothing fitted.

Three phases are added up, and the largest one counts:

build   The engine's flat copies and masters beside the weights. ZeRO-3: the partitions and, whole, the largest module.
pass    States, activations of the largest pack, and at ZeRO-3 the whole weights that DeepSpeed and autograd hold at
        that moment; gloo keeps a second copy of what it is gathering. While gradients come in: the largest module's
        whole gradients, and the reduction bucket with its copies in the collective.
update  States and the gradients in the form that the optimizer reads, or what is gathered after it.

On the CPU the libraries come on top, see `plan.libraries`. Not in it: mapped files, uneven routing (experts' rows are
taken as balanced), fragmentation, saving (a whole tensor at a time), and packs larger than the stage's first ones.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lumina_ft.config.schema import RunConfig
from lumina_ft.data.dataset import PackedDataset
from lumina_ft.models.u2_config import U2Config
from lumina_ft.parallel.footprint import FP32_BYTES, StateBytes, StoredParam, persistence_threshold, sub_groups
from lumina_ft.parallel.gathering import Gathered, GatherPoint, Read, gathered_bytes
from lumina_ft.plan.activations import Tape, Workload, embedding_tape, image_tape, layer_tape, text_tape
from lumina_ft.plan.states import WIDTHS, StageStates

_WATCHED_PACKS = 64
_REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEADS = ("lm_head", "image")
_BLOCK = ".channel_blocks."
_LOSS_HEADS = ("lm_head.", "lm_img_head.")
"""Their losses save the parameters themselves, not views that would outlive the gathered weight."""
_TABLE = "_embeddings."
"""Embedding tables; of those autograd saves the rows' numbers."""


class Peak(NamedTuple):
    """Bytes of the largest phase.

    Attributes:
        phase: `build`, `pass` or `update`; in a pass with the part of the model, `pass: backward of lm_head`.
        states: parameters, gradients and optimizer.
        gathered: whole weights beside the partitions, and the collective's copy.
        activations: kept for backward, and working memory.
        gradients: whole gradients and buckets, or their copies during the update.
        libraries: interpreter and libraries.
    """

    phase: str
    states: int
    gathered: int
    activations: int
    gradients: int
    libraries: int

    @property
    def total(self) -> int:
        """Everything."""
        return self.states + self.gathered + self.activations + self.gradients + self.libraries


class _Turn(NamedTuple):
    """A module runs.

    Attributes:
        names: its own parameters. part: of the model.
        backward: or forward.
        keeps: whether autograd keeps what this forward saves.
    """

    names: tuple[str, ...]
    part: str
    backward: bool = False
    keeps: bool = False


def measure_load(data: PackedDataset, cfg: RunConfig) -> Workload:
    """Largest counts among the first packs of a stage."""
    packs, step = [], 0
    while len(packs) < _WATCHED_PACKS and step < data.steps_per_epoch(cfg.train.packs_per_step):
        packs += data.packs_of_step(step, cfg.train.packs_per_step)
        step += 1
    return Workload.of([data.batch(pack) for pack in packs if pack is not None], data.spec.num_codebooks or 1)


def estimate_peak(cfg: RunConfig, config: U2Config, states: StageStates, load: Workload, libraries: int) -> Peak:
    """The largest phase of the rank that holds most.

    Args:
        libraries: bytes of the interpreter and its libraries; 0 for a device's own memory.
    """
    width = WIDTHS[cfg.model.dtype]
    held = max(states.ranks, key=lambda rank: rank.total)
    phases = [_build(cfg, states, held, width), _update(states, held, width)]
    phases += _passes(cfg, config, states, held, load)
    return max(phases, key=lambda peak: peak.total)._replace(libraries=libraries)


def _build(cfg: RunConfig, states: StageStates, held: StateBytes, width: int) -> Peak:
    stage = states.ds_config["zero_optimization"]["stage"]
    largest = max(p.numel for p in states.stored)
    drawn = FP32_BYTES * largest if cfg.model.random_init else 0
    if stage < 3:
        flat = width * sum(p.numel for p in states.stored if p.group is not None)
        # The old tensors beside the flat ones, and the masters; moments come with the first update.
        engine = held.parameters + flat + held.optimizer // 3
        return Peak("build", engine, 0, drawn, 0, 0)
    module = max(sum(p.numel for p in members.values()) for members in _modules(states).values())
    return Peak("build", held.parameters, module * width, drawn, 0, 0)


def _update(states: StageStates, held: StateBytes, width: int) -> Peak:
    block = states.ds_config["zero_optimization"]
    stage = block["stage"]
    trained = sum(p.numel for p in states.stored if p.group is not None)
    if stage == 3:
        limit = int(block.get("sub_group_size", _REUSE_DISTANCE))
        copies = FP32_BYTES * max(max(sizes) for sizes in sub_groups(states.stored, limit))
    elif stage == 0:
        copies = FP32_BYTES * trained if width != FP32_BYTES else width * min(trained, block["reduce_bucket_size"])
    else:
        gathering = width * min(trained, int(block["allgather_bucket_size"]))
        copies = max(gathering, held.gradients if width == FP32_BYTES else 0)
    return Peak("update", held.total, 0, 0, copies, 0)


def _passes(
    cfg: RunConfig,
    config: U2Config,
    states: StageStates,
    held: StateBytes,
    load: Workload,
) -> list[Peak]:
    """Every moment of forward and backward."""
    width = WIDTHS[cfg.model.dtype]
    turns = _turns(states, recomputed=cfg.model.gradient_checkpointing)
    chunked = cfg.model.kernels != "eager"
    points = _gather_points(states, turns, width, chunked=chunked)
    tapes = _tapes(cfg, config, load, width, chunked=chunked, trained=states.plan.lr)
    kept = dict.fromkeys(tapes, 0)
    left = Counter(turn.part for turn in turns if turn.backward)
    reducing = _reducing(states, width)
    peaks = []
    for turn, point in zip(turns, points, strict=True):
        tape = tapes[turn.part]
        kept[turn.part] = tape.kept if left[turn.part] else 0
        course = f"pass: {'backward' if turn.backward else 'forward'} of {turn.part}"
        activations = sum(kept.values()) + tape.working
        gradients = reducing if turn.backward else 0
        peaks.append(Peak(course, held.total, point.live + point.arriving, activations, gradients, 0))
        if turn.backward:
            left[turn.part] -= 1
            kept[turn.part] = tape.kept if left[turn.part] else 0
    return peaks


def _tapes(
    cfg: RunConfig, config: U2Config, load: Workload, width: int, *, chunked: bool, trained: Collection[str]
) -> dict[str, Tape]:
    """Parts of the model by name.

    Args:
        chunked: heads compute their losses themselves. trained: groups.
    """
    recomputed = cfg.model.gradient_checkpointing
    tapes = {"embeddings": embedding_tape(config, load, width)}
    for number in range(config.num_hidden_layers):
        tapes[f"layer {number}"] = layer_tape(
            config,
            load,
            width,
            routed=number >= config.first_k_dense_replace,
            spread=cfg.parallel.expert_parallel_size > 1,
            recomputed=recomputed,
        )
    tapes["norm"] = Tape(load.tokens * config.hidden_size * (FP32_BYTES + 2 * width), 0)
    tapes["lm_head"] = text_tape(config, load, width, chunked=chunked, trained="lm_head" in trained)
    images = "image_heads" in trained
    tapes["image"] = image_tape(config, load, width, recomputed=recomputed, chunked=chunked, trained=images)
    return tapes


def _part_of(name: str) -> str:
    layer = _LAYER.match(name)
    if layer:
        return f"layer {layer[1]}"
    if name.startswith(("lm_img_head.", "multi_codebook_head.")):
        return "image"
    if name.startswith("lm_head."):
        return "lm_head"
    return "norm" if name.startswith("model.norm.") else "embeddings"


def _modules(states: StageStates) -> dict[str, dict[str, StoredParam]]:
    """Parameters by name, by the module that holds them itself; in the model's order."""
    modules: dict[str, dict[str, StoredParam]] = {}
    for planned, param in zip(states.params, states.stored, strict=True):
        modules.setdefault(planned.info.name.rpartition(".")[0], {})[planned.info.name] = param
    return modules


def _turns(states: StageStates, *, recomputed: bool) -> list[_Turn]:
    """Modules with parameters in the order in which a step runs them.

    Backward visits the parts at and after the first one that has a trained parameter.
    """
    parts: dict[str, list[_Turn]] = {}
    trained: set[str] = set()
    # Modules are registered in the order in which they run, except that the codebook head comes before its heads.
    modules = sorted(_modules(states).items(), key=lambda item: item[0].startswith("lm_img_head."))
    for module, members in modules:
        part = _part_of(f"{module}.")
        parts.setdefault(part, []).append(_Turn(tuple(members), part))
        if any(param.group is not None for param in members.values()):
            trained.add(part)
    order = [part for part in parts if part not in _HEADS] + [part for part in _HEADS if part in parts]
    first = next(number for number, part in enumerate(order) if part in trained)
    turns = []
    for part in order:
        kept = part in order[first:] and not (recomputed and part.startswith("layer"))
        turns += [turn._replace(keeps=kept and not (recomputed and _BLOCK in turn.names[0])) for turn in parts[part]]
    for part in reversed(order[first:]):
        if recomputed and part.startswith("layer"):
            turns += [turn._replace(keeps=True) for turn in parts[part]]
        turns += [turn._replace(backward=True) for turn in reversed(parts[part])]
    return turns


def _gather_points(states: StageStates, turns: Sequence[_Turn], width: int, *, chunked: bool) -> list[GatherPoint]:
    block: dict[str, Any] = states.ds_config["zero_optimization"]
    if block["stage"] != 3:
        return [GatherPoint(0, 0)] * len(turns)
    threshold = persistence_threshold(states.ds_config)
    params = {
        planned.info.name: Gathered(p.numel, 0 if p.ranks == 1 or p.persists(threshold) else p.padded_numel * width)
        for planned, p in zip(states.params, states.stored, strict=True)
    }
    distance = int(block.get("stage3_max_reuse_distance", _REUSE_DISTANCE))
    linear = {p.info.name for p in states.params if p.info.name.endswith(".weight") and len(p.info.shape) == 2}
    if chunked:
        linear = {name for name in linear if not name.startswith(_LOSS_HEADS)}
    reads = []
    for turn in turns:
        saved = tuple(name for name in turn.names if name in linear and _TABLE not in name)
        reads.append(Read(turn.names, saved if turn.keeps else (), saved if turn.backward else ()))
    return gathered_bytes(reads, params, distance)


def _reducing(states: StageStates, width: int) -> int:
    """Whole gradients of the module that has most of them; the bucket, joined for and copied by the collective."""
    block = states.ds_config["zero_optimization"]
    trained = sum(p.numel for p in states.stored if p.group is not None)
    module = max(sum(p.numel for p in members.values() if p.group is not None) for members in _modules(states).values())
    bucket = min(int(block["reduce_bucket_size"]), trained) if block["stage"] else 0
    return (module + 3 * bucket) * width
