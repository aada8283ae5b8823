"""A tiny model and dataset for tests that start ranks. Imported by rank scripts and by conftest."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lumina_ft.data.segments import Kind, Role, Sample, Segment
from lumina_ft.data.shards import ShardWriter, make_meta, write_meta
from lumina_ft.data.token_spec import DEMO_TOKENIZER, demo_spec
from lumina_ft.data.tokenizer import copy_tokenizer, load_tokenizer
from lumina_ft.tokens import TokenSpec

CODEBOOKS = 4
SPEC = demo_spec(codes=16, codebooks=CODEBOOKS)
SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT

MODEL_CONFIG = {
    "model_type": "llada2_moe_veomni",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "moe_router_enable_expert_bias": True,
    "pad_token_id": SPEC.text.pad,
    "num_codebooks": CODEBOOKS,
    "image_embedding_rows": 24,
    "image_head_classes": 16,
    "ar_head_depth": 2,
    "ar_head_heads": 4,
    "text_ids": vars(SPEC.text),
    "media_ids": vars(SPEC.media),
}


def write_model_config(directory: Path) -> Path:
    path = directory / "tiny.json"
    path.write_text(json.dumps(MODEL_CONFIG))
    return path


def prepare(work: Path, *, samples: int, short: bool = False) -> Path:
    """Write `tiny.json` and `data/`, all that a rank script needs."""
    write_model_config(work)
    write_dataset(work / "data", samples=samples, short=short)
    return work


def write_dataset(directory: Path, *, samples: int, seed: int = 0, short: bool = False, spec: TokenSpec = SPEC) -> Path:
    """Random samples of three tasks in turn, as `data build` would store them.

    Args:
        short: samples of at most 48 tokens with blocks of 8 tokens; else of up to 160 with blocks of 32.
        spec: of the model; text ids stay below 300, codes below 16.
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    codebooks = spec.num_codebooks

    def text(role: Role, turn: int, length: int) -> Segment:
        ids = rng.integers(0, 300, length).astype(np.int32)
        return Segment(role, turn, Kind.TEXT, ids, np.zeros((0, codebooks), np.uint16))

    def image(role: Role, turn: int) -> Segment:
        codes = rng.integers(0, 16, (4, codebooks)).astype(np.uint16)
        return Segment(role, turn, Kind.IMAGE, np.zeros(0, np.int32), codes, (2, 2))

    def size(low: int, high: int) -> int:
        return int(rng.integers(low, min(high, 6) if short else high))

    turns: dict[str, Sequence] = {
        "t2i": (lambda: (text(USER, 0, size(3, 9)), image(ASSISTANT, 1)),),
        "understand": (lambda: (image(USER, 0), text(USER, 0, size(3, 9)), text(ASSISTANT, 1, size(1, 12))),),
        "text": (lambda: (text(USER, 0, size(3, 20)), text(ASSISTANT, 1, size(1, 30))),),
    }
    writer = ShardWriter(directory, num_codebooks=codebooks)
    for index in range(samples):
        task = tuple(turns)[index % len(turns)]
        segments = (text(SYSTEM, -1, 1 if short else 4), *turns[task][0]())
        writer.add(Sample(index, task, segments, f"raw.jsonl:{index + 1}"))
    counts, shards = writer.close()
    meta = make_meta(
        counts=counts,
        shards=shards,
        spec=spec,
        tokenizer_identity=load_tokenizer("demo").identity,
        codec={"kind": "pq", "identity": "test"},
        system_prompts={},
        block_tokens=8 if short else 32,
    )
    write_meta(directory, meta)
    copy_tokenizer(DEMO_TOKENIZER, directory / "tokenizer")
    return directory


def run_config(work: Path, output: str, **sections: object) -> dict:
    """A run of three stages on the tiny model; `sections` replace whole sections."""
    return {
        "output_dir": str(work / output),
        "seed": 3,
        "model": {
            "config": str(work / "tiny.json"),
            "random_init": True,
            "dtype": "float32",
            "gradient_checkpointing": True,
        },
        "data": {"path": str(work / "data"), "eval_fraction": 0.1, "max_pack_tokens": 160},
        "optim": {"lr": 1e-3},
        "train": {"packs_per_step": 4, "save_every_steps": 3, "tensorboard": False, "plots": False},
        "parallel": {"ranks": 2, "zero": "zero3"},
        "stages": [
            {"name": "no_vision", "freeze": ["vision"], "steps": 5},
            {"name": "heads", "train": ["heads"], "steps": 3},
            {"name": "full", "steps": 3},
        ],
        **sections,
    }


def copy_run(source: Path, target: Path, keep: Sequence[str]) -> None:
    """Copy a run directory with only the named checkpoints."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
    for name in keep:
        shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)
