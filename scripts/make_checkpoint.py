"""Write a large checkpoint with random weights, and optionally a random adapter for it: something to measure with.

    python scripts/make_checkpoint.py out/big --size-gb 6 --layout split --adapter out/big-adapter

The model is the published one with fewer layers. Weights are normal numbers of one drawn block, shifted from piece to
piece: as good as drawn ones for reading, hashing and merging, and as fast as the disk. Norms have weights around 1, so
that the model trains, too.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from lumina_ft.adapters.expert_layout import wrapper_names
from lumina_ft.adapters.targets import plan_targets
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.models.hf_keys import CHANNEL_MASK
from lumina_ft.models.identity import model_identity
from lumina_ft.models.native import ModelTensors, channel_mask, model_tensors, row_pieces
from lumina_ft.models.tensor_files import TensorSpec
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config
from lumina_ft.models.weights import ModelWriter, export_config

_BLOCK = 1 << 24
DEFAULT_TARGETS = ("attention", "dense_mlp", "shared_experts")
_STEP = 1_000_003
"""Shift between pieces; prime, so that blocks don't come back soon."""


def published_config(layers: int) -> U2Config:
    """The published sizes with another number of layers."""
    return U2Config(num_codebooks=8, codebook_size=4096, num_hidden_layers=layers)


def tensor_specs(tensors: ModelTensors, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """What a checkpoint of the model holds."""
    specs = {n: TensorSpec(s, torch.float32 if n in tensors.buffers else dtype) for n, s in tensors.shapes.items()}
    if CHANNEL_MASK in specs:
        specs[CHANNEL_MASK] = TensorSpec(specs[CHANNEL_MASK].shape, torch.bfloat16)
    return specs


def size_of(config: U2Config, dtype: torch.dtype) -> int:
    """Bytes of its tensors."""
    return sum(spec.num_bytes for spec in tensor_specs(model_tensors(config), dtype).values())


def layers_for(num_bytes: float, dtype: torch.dtype) -> int:
    """Fewest layers whose model has at least this size."""
    layers = 1
    while size_of(published_config(layers), dtype) < num_bytes:
        layers += 1
    return layers


def write_checkpoint(directory: Path, config: U2Config, *, layout: str, dtype: torch.dtype, seed: int) -> int:
    """Write random weights; returns their bytes."""
    specs = tensor_specs(model_tensors(config), dtype)
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed)) * config.initializer_range).to(dtype)
    block = torch.cat((block, block))
    shift = 0
    writer = ModelWriter(directory, specs, layout=layout, config_json=export_config(config, dtype))
    with writer:
        for name, spec in specs.items():
            if name == CHANNEL_MASK:
                writer.write(name, channel_mask(config.id_columns))
                continue
            for rows in row_pieces(spec.shape):
                shape = (rows.stop - rows.start, *spec.shape[1:])
                count = torch.Size(shape).numel()
                shift = (shift + _STEP) % _BLOCK
                values = block[shift : shift + count] + (1.0 if name.endswith("norm.weight") else 0.0)
                writer.write_rows(name, rows.start, values.reshape(shape).to(spec.dtype))
    return sum(spec.num_bytes for spec in specs.values())


def write_random_adapter(
    directory: Path, base: Path, config: U2Config, *, rank: int, seed: int, targets: Sequence[str] = DEFAULT_TARGETS
) -> int:
    """Write a plain PEFT adapter with the hashes of the base; returns how many tensors it adapts.

    Its updates are about as large as those of a short training: a few percent of the weights.

    Args:
        targets: as in `lora.targets`.
    """
    with torch.device("meta"):
        cfg = LoraConfig(rank=rank, alpha=2.0 * rank, targets=tuple(targets))
        adapted = plan_targets(U2ForDiffusion(config), cfg)
    stacked = [target.module for target in adapted if target.num_experts]
    names = wrapper_names(stacked)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for target in adapted:
        prefix = f"base_model.model.{names.get(target.module, target.module)}.lora_"
        pairs = rank * (target.num_experts or 1)
        tensors[f"{prefix}A.weight"] = torch.randn(pairs, target.in_features, generator=draw) / rank
        tensors[f"{prefix}B.weight"] = torch.randn(target.out_features, pairs, generator=draw) * 1e-3
    identity = model_identity(base)
    metadata = {
        "format": "pt",
        "lumina_ft.base": identity.digest,
        "lumina_ft.base_tensors": json.dumps(identity.tensors),
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings |= {"target_modules": sorted(target.module for target in adapted if not target.num_experts)}
    settings |= {"target_parameters": stacked}
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(adapted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--layers", type=int, help="decoder layers; the published model has 20")
    size.add_argument("--size-gb", type=float, default=6.0, help="at least this many GB, in as few layers as reach it")
    parser.add_argument("--layout", choices=("packed", "split"), default="split")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--adapter", type=Path, help="also write a random adapter here")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=DEFAULT_TARGETS, help="what it adapts, as in lora.targets")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists")
    dtype = getattr(torch, args.dtype)
    config = published_config(args.layers or layers_for(args.size_gb * 1e9, dtype))
    num_bytes = write_checkpoint(args.output, config, layout=args.layout, dtype=dtype, seed=args.seed)
    made = {"output": str(args.output), "layers": config.num_hidden_layers, "gb": round(num_bytes / 1e9, 3)}
    if args.adapter:
        options = {"rank": args.rank, "seed": args.seed, "targets": args.targets}
        adapted = write_random_adapter(args.adapter, args.output, config, **options)
        made |= {"adapter": str(args.adapter), "adapted_tensors": adapted, "rank": args.rank}
    print(json.dumps(made))


if __name__ == "__main__":
    main()
