"""Image decoding in spatial rounds (spec §7)."""

import math
from dataclasses import replace

import pytest
import torch

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.image import ImagePrompt, ImageSettings, decode_images
from lumina_ft.generate.prompt import Prompt, sample_generators

GRIDS = ((2, 2), (3, 4), (1, 5))


def prompts_of(tiny, grids=GRIDS) -> list[ImagePrompt]:
    return [ImagePrompt(tiny.image([5 + i, 6, 7], h, w), tiny.image([9], h, w)) for i, (h, w) in enumerate(grids)]


def decode(tiny, prompts, *, seeds=None, **settings):
    options = ImageSettings(**{"rounds": 4, "guidance": 1.5, "temperature": 0.0, **settings})
    return decode_images(tiny.model, prompts, spec=tiny.spec, settings=options, generators=seeds)


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_every_place_gets_codes_and_newlines_are_left_out(tiny):
    for (height, width), codes in zip(GRIDS, decode(tiny, prompts_of(tiny)), strict=True):
        assert codes.shape == (height * width, tiny.spec.num_codebooks) and codes.dtype == torch.int64
        assert int(codes.min()) >= 0 and int(codes.max()) < tiny.spec.media.codebook_size


def test_small_packs_give_the_same_images(tiny):
    assert same(decode(tiny, prompts_of(tiny), max_pack_tokens=30), decode(tiny, prompts_of(tiny)))


def test_the_same_prompt_object_may_occur_more_than_once(tiny):
    one = prompts_of(tiny)[1]
    first, second = decode(tiny, [one, one])
    assert torch.equal(first, second) and torch.equal(first, decode(tiny, [one])[0])


def test_sampled_images_depend_on_the_own_seed_only(tiny):
    prompts = [prompts_of(tiny)[1]] * 3
    together = decode(tiny, prompts, seeds=sample_generators(1, 3), temperature=1.0)
    for number in range(3):
        alone = decode(tiny, prompts[:1], seeds=sample_generators(1, 1, first=number), temperature=1.0)
        assert torch.equal(alone[0], together[number])
    assert not torch.equal(together[0], together[1])


def test_guidance_zero_is_the_conditional_branch_and_below_zero_the_unconditional(tiny):
    cond, uncond = tiny.image([5, 6, 7], 2, 3), tiny.image([9], 2, 3)
    both = ImagePrompt(cond, uncond)
    assert same(decode(tiny, [both], guidance=0.0), decode(tiny, [ImagePrompt(cond)], guidance=0.0))
    assert same(decode(tiny, [both], guidance=-1.0), decode(tiny, [ImagePrompt(uncond)], guidance=0.0))
    assert not same(decode(tiny, [both], guidance=-1.0), decode(tiny, [both], guidance=0.0))


def test_identical_branches_need_one_pass(tiny, monkeypatch):
    cond = tiny.image([5, 6, 7], 2, 3)
    rows = []
    forward = tiny.model.forward
    monkeypatch.setattr(tiny.model, "forward", lambda **k: rows.append(len(k["input_ids"])) or forward(**k))
    got = decode(tiny, [ImagePrompt(cond, tiny.image([5, 6, 7], 2, 3))], guidance=3.0)
    assert set(rows) == {len(cond)}
    assert same(got, decode(tiny, [ImagePrompt(cond)], guidance=0.0))


def test_identical_branches_beside_different_ones(tiny):
    plain = prompts_of(tiny)[1]
    twin = ImagePrompt(plain.cond, plain.cond)
    assert same(decode(tiny, [twin, plain]), [decode(tiny, [twin])[0], decode(tiny, [plain])[0]])


def test_masked_rows_follow_the_cosine_schedule(tiny, monkeypatch):
    """Positions handed to the codebook head per round: M0, then max(1, floor(M0 cos)) but always at least one fewer."""
    seen = []
    step = tiny.model.image_step

    def watch(hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        if codes.shape[1] == 0:
            seen.append(len(hidden))
        return step(hidden, codes)

    monkeypatch.setattr(tiny.model, "image_step", watch)
    start, rounds = 12, 6
    decode(tiny, [prompts_of(tiny)[1]], rounds=rounds)
    want = [start]
    for index in range(rounds - 1):
        keep = max(1, math.floor(start * math.cos(math.pi * (index + 1) / (2 * rounds))))
        want.append(min(keep, want[-1] - 1))
    assert seen == want
    seen.clear()
    decode(tiny, [prompts_of(tiny)[1]], rounds=96)
    assert seen == list(range(start, 0, -1)), "at least one position is fixed per round; then the loop ends"


def test_given_codes_stay(tiny):
    """Rows that hold codes at the start are context, not answers."""
    prompt = tiny.image([5, 6, 7], 2, 3)
    row = int((prompt.type_ids == 4).nonzero()[1])
    ids = prompt.input_ids.clone()
    ids[row] = torch.arange(tiny.spec.num_codebooks)
    (codes,) = decode(tiny, [ImagePrompt(Prompt(**{**vars(prompt), "input_ids": ids}))], guidance=0.0)
    assert codes[1].tolist() == list(range(tiny.spec.num_codebooks))


def test_surprise_28_greedy_decoding_draws_no_random_numbers(tiny):
    generators = sample_generators(0, 1)
    state = generators[0].get_state()
    decode(tiny, prompts_of(tiny)[:1], seeds=generators)
    assert torch.equal(generators[0].get_state(), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds — 0 — must be at least 1"),
        ({"temperature": -0.5}, "temperature — -0.5 — must be at least 0"),
        ({"temperature": math.nan}, "temperature — nan — must be at least 0 and finite"),
        ({"temperature": math.inf}, "temperature — inf — must be at least 0 and finite"),
        ({"guidance": math.nan}, "guidance — nan — must be finite"),
        ({"temperature": 1.0}, "needs one generator for each of 3 samples"),
        ({"guidance": 0.0, "guidance_text": 1.0}, "guidance_text=1.0, guidance_image=None — only one is set"),
        ({"guidance_text": 1.0, "guidance_image": 1.0}, "guidance=1.5 — together with guidance_text"),
    ],
)
def test_bad_settings_are_refused(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        decode(tiny, prompts_of(tiny), **settings)


def test_surprise_29_the_answer_must_be_framed(tiny):
    prompt = tiny.image([5, 6, 7], 2, 2)

    def broken(**fields: object) -> list[ImagePrompt]:
        return [ImagePrompt(Prompt(**{**vars(prompt), **fields}))]

    def cut(rows: slice) -> list[ImagePrompt]:
        return broken(**{name: value[rows] for name, value in vars(prompt).items()})

    for case in (cut(slice(0, -1)), cut(slice(4, None))):
        with pytest.raises(DataError, match="must stand, without a gap, between <answer> <BOI>"):
            decode(tiny, case, guidance=0.0)
    with pytest.raises(DataError, match="no row of type 4"):
        decode(tiny, broken(type_ids=torch.ones_like(prompt.type_ids)), guidance=0.0)
    half = prompt.input_ids.clone()
    half[int((prompt.type_ids == 4).nonzero()[0]), 0] = 1
    with pytest.raises(DataError, match="only some codebooks are masked"):
        decode(tiny, broken(input_ids=half), guidance=0.0)
    full = prompt.input_ids.clone()
    full[full == tiny.spec.media.mask] = 1
    with pytest.raises(DataError, match="nothing to decode"):
        decode(tiny, broken(input_ids=full), guidance=0.0)
    with pytest.raises(DataError, match="image decoding needs them"):
        decode(tiny, broken(turn_ids=None, block_ids=None, is_clean=None), guidance=0.0)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_codes_stay_below_the_codebook_size_when_the_head_has_more_classes(tiny, temperature):
    few = replace(tiny.spec, media=replace(tiny.spec.media, codebook_size=2))
    settings = ImageSettings(rounds=2, guidance=0.0, temperature=temperature)
    codes = decode_images(
        tiny.model, prompts_of(tiny), spec=few, settings=settings, generators=sample_generators(0, len(GRIDS))
    )
    assert max(int(c.max()) for c in decode(tiny, prompts_of(tiny))) > 1
    assert {int(value) for c in codes for value in c.flatten()} == {0, 1}
