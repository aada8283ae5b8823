"""Parity of text and image decoding with the golden vectors: greedy tokens must be exact.

`LUMINA_GOLDEN` names another folder of the same structure.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.image import ImagePrompt, ImageSettings, decode_images
from lumina_ft.generate.prompt import Prompt, sample_generators
from lumina_ft.generate.text import TextSettings, decode_text
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.tokens import PUBLISHED_TEXT_IDS, MediaIds, TextIds, TokenSpec

GOLDEN = Path(os.environ.get("LUMINA_GOLDEN") or Path(__file__).parents[1] / "golden")
SETS = ("A", "B")
TEXT_TASKS = ("text", "understand")
BRANCHES = ("cond", "uncond", "uncond_text", "uncond_image")

pytestmark = pytest.mark.parametrize("name", SETS)


@lru_cache
def model_of(name: str) -> U2ForDiffusion:
    return U2ForDiffusion.from_pretrained(GOLDEN / name)


@lru_cache
def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = json.loads((GOLDEN / name / "generate.json").read_text())
    return content, load_file(GOLDEN / name / "generate.safetensors")


def spec_of(name: str) -> TokenSpec:
    ids, config = case(name)[0]["token_ids"], model_of(name).config
    text = {**vars(PUBLISHED_TEXT_IDS), "mask": ids["text_mask"], "pad": ids["pad"]}
    text |= {key: ids[key] for key in ("boa", "eoa", "boi", "eoi")}
    newline = ids["newline"]
    media = MediaIds(config.image_head_classes, ids["image_mask"], newline, *range(newline + 1, newline + 5))
    return TokenSpec(TextIds(**text), media, config.num_codebooks)


def text_prompt(name: str, task: str, *, metadata: bool = True) -> Prompt:
    tensors = case(name)[1]
    field = {key: tensors[f"{task}.prefix_{key}"] for key in ("tokens", "type_ids", "turn_ids", "block_ids")}
    clean, positions = tensors[f"{task}.prefix_is_clean"].bool(), tensors[f"{task}.prefix_position_ids"]
    if not metadata:
        plain = torch.arange(len(clean))
        return Prompt(field["tokens"], field["type_ids"].to(torch.uint8), plain, None, None, None)
    return Prompt(
        field["tokens"], field["type_ids"].to(torch.uint8), positions, field["turn_ids"], field["block_ids"], clean
    )


def run_text(name: str, task: str, *, stop_id: int | None = None, steps: int | None = None, metadata: bool = True):
    settings = case(name)[0]["info"][task]["settings"]
    return decode_text(
        model_of(name),
        [text_prompt(name, task, metadata=metadata)],
        mask_id=settings["mask_id"],
        settings=TextSettings(
            max_new_tokens=settings["gen_length"],
            block_tokens=settings["block_length"],
            steps_per_block=steps or settings["steps_per_block"],
            temperature=settings["temperature"],
            stop_id=stop_id,
        ),
    )[0].tolist()


def branch(name: str, task: str, which: str) -> Prompt:
    """Rows of one branch: the user prefix is clean in turn 0, what follows is the noisy answer in turn 1."""
    info, tensors = case(name)
    ids, types = tensors[f"{task}.{which}.input_ids"][0], tensors[f"{task}.{which}.type_position_ids"][0]
    clean = torch.arange(len(ids)) < info["info"][task]["user_prefix_len"][which]
    blocks = torch.zeros(len(ids), dtype=torch.int64)
    return Prompt(ids, types.to(torch.uint8), torch.arange(len(ids)), (~clean).long(), blocks, clean)


def image_prompt(name: str, task: str) -> ImagePrompt:
    return ImagePrompt(**{which: branch(name, task, which) for which in BRANCHES})


def run_images(name: str, prompts: list[ImagePrompt], **settings: Any) -> list[Tensor]:
    return decode_images(
        model_of(name), prompts, spec=spec_of(name), settings=ImageSettings(**{"temperature": 0.0, **settings})
    )


RUNS = {
    "cfg0": {"guidance": 0.0},
    "cfg3": {"guidance": 3.0},
    "cfg3_one_step": {"guidance": 3.0, "rounds": 1},
    "dual_1.5_0.7": {"guidance": 0.0, "guidance_text": 1.5, "guidance_image": 0.7},
}


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_greedy_text_tokens_are_exact(name: str, task: str):
    assert run_text(name, task) == case(name)[1][f"{task}.tokens"].tolist()


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_text_in_one_step_per_block(name: str, task: str):
    assert run_text(name, task, steps=1) == case(name)[1][f"{task}.tokens_one_step"].tolist()


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_text_ends_before_the_first_stop_token(name: str, task: str):
    info, tensors = case(name)
    full = tensors[f"{task}.tokens"].tolist()
    early = info["info"][task]["early_stop_token"]
    assert run_text(name, task, stop_id=early) == tensors[f"{task}.tokens_early_stop"].tolist()
    assert run_text(name, task, stop_id=full[0]) == tensors[f"{task}.tokens_stop_at_first"].tolist() == []


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_text_without_metadata(name: str, task: str):
    assert run_text(name, task, metadata=False) == case(name)[1][f"{task}.tokens_without_meta"].tolist()


@pytest.mark.parametrize(
    ("task", "run"), [(task, run) for task in ("t2i", "edit") for run in RUNS if task == "edit" or "dual" not in run]
)
def test_greedy_image_codes_are_exact(name: str, task: str, run: str):
    rounds = case(name)[0]["info"][task]["settings"]["timesteps"]
    (codes,) = run_images(name, [image_prompt(name, task)], **{"rounds": rounds, **RUNS[run]})
    assert torch.equal(codes[None], case(name)[1][f"{task}.{run}.tokens"])


@pytest.mark.parametrize("task", ["t2i", "edit"])
def test_first_hidden_states_and_mask(name: str, task: str):
    tensors = case(name)[1]
    rows = branch(name, task, "cond")
    inputs = {"type_ids": rows.type_ids, "position_ids": rows.position_ids}
    cu_seqlens = torch.tensor([0, len(rows)], dtype=torch.int32)
    with torch.inference_mode():
        packed = model_of(name)(rows.input_ids, cu_seqlens=cu_seqlens, **inputs, **rows.metadata()).hidden
        masked = model_of(name)(rows.input_ids, allowed=tensors[f"{task}.cond.allowed"], **inputs).hidden
    want = tensors[f"{task}.cond.first_step_hidden"][0]
    for hidden in (packed, masked):
        assert (hidden[rows.type_ids == 4] - want).abs().max() < 5e-5


def test_packed_text_equals_one_by_one(name: str):
    prompts = [text_prompt(name, task) for task in (*TEXT_TASKS, "text")]
    settings = case(name)[0]["info"]["text"]["settings"]
    shared = dict(mask_id=settings["mask_id"])
    options = TextSettings(20, settings["block_length"], settings["steps_per_block"], stop_id=None)
    together = decode_text(model_of(name), prompts, settings=options, **shared)
    alone = [decode_text(model_of(name), [prompt], settings=options, **shared)[0] for prompt in prompts]
    assert [t.tolist() for t in together] == [t.tolist() for t in alone]


def test_packed_images_of_different_grids_equal_one_by_one(name: str):
    prompts = [image_prompt(name, task) for task in ("t2i", "edit", "t2i")]
    together = run_images(name, prompts, rounds=4, guidance=3.0)
    alone = [run_images(name, [prompt], rounds=4, guidance=3.0)[0] for prompt in prompts]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_surprise_27_caller_tensors_are_not_written(name: str):
    prompt = image_prompt(name, "edit")
    before = {which: getattr(prompt, which).input_ids.clone() for which in BRANCHES}
    run_images(name, [prompt], rounds=2, guidance=3.0)
    assert all(torch.equal(getattr(prompt, which).input_ids, ids) for which, ids in before.items())


def test_sampling_is_a_function_of_each_samples_seed(name: str):
    """Same seed, same image; another seed, another one; companions in the pack change nothing."""
    prompts = [image_prompt(name, "t2i")] * 3
    options = ImageSettings(rounds=3, guidance=3.0, temperature=1.0)
    spec = spec_of(name)

    def draw(count: int, first: int) -> list[Tensor]:
        generators = sample_generators(7, count, first=first)
        return decode_images(model_of(name), prompts[:count], spec=spec, settings=options, generators=generators)

    together = draw(3, 0)
    assert all(torch.equal(draw(1, i)[0], together[i]) for i in range(3))
    assert not torch.equal(together[0], together[1])


def test_bad_inputs_are_refused(name: str):
    """The eleven refusals of the golden `bad_inputs`, as our errors; an unknown remasking rule can't be asked for."""
    prompt, spec = image_prompt(name, "edit"), spec_of(name)
    cond, uncond = prompt.cond, prompt.uncond
    assert uncond is not None
    start = int((cond.type_ids == 4).nonzero()[0])

    def replaced(rows: Prompt, **fields: Tensor | None) -> Prompt:
        return Prompt(**{**vars(rows), **fields})

    unframed = cond.input_ids.clone()
    unframed[start - 1] = 0
    with pytest.raises(DataError, match="must stand, without a gap, between <answer> <BOI>"):
        run_images(name, [ImagePrompt(replaced(cond, input_ids=unframed))], guidance=0.0)
    with pytest.raises(ConfigError, match="only one is set"):
        ImageSettings(guidance=0.0, guidance_text=1.0)
    with pytest.raises(ConfigError, match="exclude each other"):
        ImageSettings(guidance=3.0, guidance_text=1.0, guidance_image=1.0)
    with pytest.raises(ConfigError, match="dual guidance needs both"):
        run_images(name, [ImagePrompt(cond, uncond)], guidance=0.0, guidance_text=1.0, guidance_image=1.0)
    with pytest.raises(ConfigError, match="no unconditional branch"):
        run_images(name, [ImagePrompt(cond)], guidance=3.0)
    with pytest.raises(ConfigError, match="dual guidance is for editing"):
        run_images(name, [image_prompt(name, "t2i")], guidance=0.0, guidance_text=1.0, guidance_image=1.0)
    with pytest.raises(DataError, match=r"input_ids — shape \[2, .* must be \[rows, codebooks\] of one sample"):
        replaced(cond, input_ids=torch.stack([cond.input_ids] * 2))
    with pytest.raises(DataError, match=r"must be \[rows, codebooks\]"):
        replaced(cond, input_ids=cond.input_ids[:, 0])
    with pytest.raises(DataError, match=rf"position_ids — shape .* must be \[{len(cond)}\]"):
        replaced(cond, position_ids=cond.position_ids[:-1])
    pattern = uncond.input_ids.clone()
    pattern[int((uncond.type_ids == 4).nonzero()[0])] = 3
    with pytest.raises(DataError, match="branches need the same mask pattern"):
        run_images(name, [ImagePrompt(cond, replaced(uncond, input_ids=pattern))], guidance=3.0)
    with pytest.raises(DataError, match="branches decode the same grid"):
        run_images(name, [ImagePrompt(cond, image_prompt(name, "t2i").uncond)], guidance=3.0)
    with pytest.raises(DataError, match="turn_ids, block_ids and is_clean go together"):
        replaced(text_prompt(name, "text"), block_ids=None)
    with pytest.raises(TypeError, match="remasking"):
        TextSettings(remasking="entropy")  # pyright: ignore[reportCallIssue]
    assert spec.media.mask == int(cond.input_ids[start, 0])
