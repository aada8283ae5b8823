"""Block-diffusion decoding of text (spec §7)."""

import pytest
import torch

from lumina_ft.errors import ConfigError, DataError
from lumina_ft.generate.prompt import Prompt, chunks, sample_generators
from lumina_ft.generate.text import TextSettings, block_mask, commit_schedule, decode_text
from lumina_ft.models.u2 import U2ForDiffusion
from lumina_ft.models.u2_config import U2Config

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11])


def decode(tiny, prompts, *, seeds=None, **settings):
    options = TextSettings(**{"max_new_tokens": 11, "block_tokens": 4, "steps_per_block": 2, **settings})
    answers = decode_text(
        tiny.model,
        [tiny.text(ids) for ids in prompts],
        mask_id=tiny.spec.text.mask,
        settings=options,
        generators=seeds,
    )
    return [a.tolist() for a in answers]


@pytest.mark.parametrize(
    ("rows", "steps", "want"),
    [(32, 32, [1] * 32), (8, 3, [3, 3, 2]), (4, 1, [4]), (3, 5, [1, 1, 1]), (7, 4, [2, 2, 2, 1])],
)
def test_commit_schedule_spreads_the_remainder_over_the_first_steps(rows: int, steps: int, want: list[int]):
    assert commit_schedule(rows, steps) == want and sum(want) == rows


def test_every_row_of_an_answer_is_filled_and_the_last_block_may_be_short(tiny):
    answers = decode(tiny, PROMPTS, ban_mask_id=True)
    assert [len(a) for a in answers] == [11] * 3
    assert all(tiny.spec.text.mask not in a for a in answers)


def test_small_packs_give_the_same_answers(tiny):
    assert decode(tiny, PROMPTS, max_pack_tokens=20) == decode(tiny, PROMPTS)


def test_a_stopped_sample_leaves_the_pack_and_the_others_go_on(tiny):
    free = decode(tiny, PROMPTS)
    stop = free[0][1]
    want = [a[: a.index(stop)] if stop in a else a for a in free]
    assert decode(tiny, PROMPTS, stop_id=stop) == want
    assert len(want[0]) < 4 and any(len(a) == 11 for a in want), "the case must stop one sample early, not all"


def test_model_calls_end_when_all_have_stopped(tiny, monkeypatch):
    calls = []
    forward = tiny.model.forward
    monkeypatch.setattr(tiny.model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    first = decode(tiny, PROMPTS[:1])[0][0]
    assert len(calls) == 6
    calls.clear()
    assert decode(tiny, PROMPTS[:1], stop_id=first) == [[]]
    assert len(calls) == 2


def test_sampled_answers_depend_on_the_own_seed_only(tiny):
    options = {"temperature": 1.0}
    together = decode(tiny, [PROMPTS[0]] * 4, seeds=sample_generators(3, 4), **options)
    for number in range(4):
        alone = decode(tiny, [PROMPTS[0]], seeds=sample_generators(3, 1, first=number), **options)
        assert alone == [together[number]]
    assert len({tuple(a) for a in together}) == 4
    assert decode(tiny, [PROMPTS[0]] * 4, seeds=sample_generators(4, 4), **options) != together


def test_sampling_follows_the_models_distribution(tiny):
    """First token of a one-row answer: frequencies match softmax(logits / T)."""
    count, temperature = 4000, 0.6
    prompt = tiny.text([5, 6, 7])
    settings = TextSettings(max_new_tokens=1, block_tokens=1, steps_per_block=1, temperature=temperature)
    mask = tiny.spec.text.mask
    generators = sample_generators(0, count)
    answers = decode_text(tiny.model, [prompt] * count, mask_id=mask, settings=settings, generators=generators)
    rows = torch.cat([prompt.input_ids, torch.full((1, prompt.input_ids.shape[1]), mask)])
    with torch.inference_mode():
        hidden = tiny.model(
            rows,
            type_ids=torch.tensor([*prompt.type_ids.tolist(), 3]),
            turn_ids=torch.tensor([*prompt.turn_ids.tolist(), 1]),
            block_ids=torch.tensor([*prompt.block_ids.tolist(), 0]),
            is_clean=torch.tensor([*prompt.is_clean.tolist(), False]),
            cu_seqlens=torch.tensor([0, len(rows)]),
        ).hidden
        want = (tiny.model.text_logits(hidden[-1:]).double()[0] / temperature).softmax(0)
    got = torch.bincount(torch.cat(answers), minlength=len(want)) / count
    top = want.topk(5).indices
    assert want[top].sum() > 0.1, "the case needs some likely tokens"
    deviation = (want[top] * (1 - want[top]) / count).sqrt()
    assert ((got[top] - want[top]).abs() < 4 * deviation).all()


def test_surprise_30_the_mask_id_can_be_banned(tiny, monkeypatch):
    mask = tiny.spec.text.mask
    logits = tiny.model.text_logits

    def eager_for_masks(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden).clone()
        out[:, mask] = 1e3
        return out

    monkeypatch.setattr(tiny.model, "text_logits", eager_for_masks)
    assert decode(tiny, PROMPTS[:1]) == [[mask] * 11]
    assert mask not in decode(tiny, PROMPTS[:1], ban_mask_id=True)[0]


def test_surprise_28_greedy_decoding_draws_no_random_numbers(tiny):
    generators = sample_generators(0, 1)
    state = generators[0].get_state()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    decode(tiny, PROMPTS[:1], seeds=generators)
    assert torch.equal(generators[0].get_state(), state) and torch.equal(torch.get_rng_state(), before)


def test_text_only_models_decode_with_one_column():
    config = U2Config.load("u2-tiny")
    config.num_codebooks, config.num_hidden_layers = None, 2
    model = U2ForDiffusion(config).eval()
    model.init_weights_(seed=0)
    spec = config.token_spec()
    ids = torch.tensor([[5], [6], [spec.text.boa]])
    turns = torch.tensor([0, 0, 1])
    prompt = Prompt(ids, torch.ones(3, dtype=torch.uint8), torch.arange(3), turns, turns - 1, turns == 0)
    settings = TextSettings(max_new_tokens=6, block_tokens=4, steps_per_block=2)
    (answer,) = decode_text(model, [prompt], mask_id=spec.text.mask, settings=settings)
    assert answer.shape == (6,)


def test_block_mask_without_metadata():
    mask = block_mask([2, 1], 3, block_tokens=2)
    assert mask[:5, :5].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert not mask[:5, 5:].any() and not mask[5:, :5].any() and mask[5:, 5:].shape == (4, 4)


def test_chunks_are_consecutive_and_within_the_limit():
    assert [list(c) for c in chunks([3, 3, 3, 9, 1], 6)] == [[0, 1], [2], [3], [4]]
    assert list(chunks([], 6)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_tokens": 0}, "block_tokens — 0 — must be at least 1"),
        ({"steps_per_block": 0}, "steps_per_block — 0 — must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens — 0 — must be at least 1"),
        ({"temperature": -1.0}, "temperature — -1.0 — must be at least 0"),
        ({"temperature": 1.0}, "temperature — 1.0 with 0 generators — needs one generator for each of 3 samples"),
    ],
)
def test_bad_settings_are_refused(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        decode(tiny, PROMPTS, **settings)


def test_prompts_with_and_without_metadata_do_not_mix(tiny):
    plain = tiny.text([5, 6])
    bare = Prompt(plain.input_ids, plain.type_ids, plain.position_ids, None, None, None)
    with pytest.raises(DataError, match="some without metadata"):
        decode_text(tiny.model, [plain, bare], mask_id=1, settings=TextSettings())
