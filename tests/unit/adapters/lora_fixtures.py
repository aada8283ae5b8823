"""A tiny model on disk, and what it answers on a small pack."""

from pathlib import Path

import torch
from merge_fixtures import tiny_config, tiny_model
from torch import Tensor, nn

from lumina_ft.adapters.files import write_adapter
from lumina_ft.adapters.lora import Adapter, attach_adapter
from lumina_ft.config.groups import expand_group
from lumina_ft.config.lora_schema import LoraConfig
from lumina_ft.models.groups import group_of, is_adapter_name
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.tokens import IGNORE, TYPE_ANSWER_MEDIA, TYPE_ANSWER_TEXT, TYPE_TEXT


def save_base(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Random weights, also where a fresh model has zeros, which would hide the codebook head's blocks."""
    model = tiny_model(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "adaLN" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    model.save_pretrained(directory)
    return directory


def meta_model() -> U2ForDiffusion:
    with torch.device("meta"):
        return U2ForDiffusion(tiny_config())


def pack() -> dict[str, Tensor]:
    """Text and image positions of one sample, some of each supervised."""
    generator = torch.Generator().manual_seed(7)
    types = torch.tensor([TYPE_TEXT] * 6 + [TYPE_ANSWER_MEDIA] * 6 + [TYPE_ANSWER_TEXT] * 6, dtype=torch.uint8)
    ids = torch.randint(0, 8, (18, 3), generator=generator)
    labels = torch.full((18, 3), IGNORE)
    labels[7:11] = ids[7:11]
    labels[14:17] = ids[14:17, :1]
    return {"input_ids": ids, "type_ids": types, "labels": labels}


def answers(model: nn.Module) -> Tensor:
    """Logits of both kinds in one row."""
    model.eval()
    with torch.no_grad():
        out = model(**pack(), return_logits=True)
    return torch.cat([out.logits_text.flatten(), out.logits_image.flatten()])


def train(model: U2ForDiffusion, cfg: LoraConfig, std: float = 0.05) -> set[str]:
    """Move the adapter and the modules beside it at random; returns the groups that changed."""
    groups = {group for entry in cfg.modules_to_save for group in expand_group(entry, "modules_to_save")}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_adapter_name(name) or group_of(name) in groups:
                param.add_((torch.randn(param.shape, generator=generator) * std).to(param.dtype))
    return groups


def trained(base: Path, folder: Path, cfg: LoraConfig) -> tuple[U2ForDiffusion, Adapter]:
    """A model with a trained adapter, which is written to `folder`."""
    model = U2ForDiffusion.from_pretrained(base)
    adapter = attach_adapter(model, cfg, seed=3)
    changed = train(model, cfg)
    write_adapter(folder, model, adapter, base=None, base_name=str(base), changed=changed)
    return model, adapter
