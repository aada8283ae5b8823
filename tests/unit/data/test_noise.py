"""Noise: what is masked, how much, and that it is a function of (seed, epoch, sample) only."""

import numpy as np
import pytest

from lumina_ft.config.schema import NoiseConfig
from lumina_ft.data.draws import Stream, philox4x32, uniforms
from lumina_ft.data.layout import layout_sample
from lumina_ft.data.noise import apply_noise, noise_layouts

TEXT_MASK, IMAGE_MASK = 200, 50


def lay(make, sample):
    return layout_sample(sample, make.spec, block_tokens=4, answer_tail="eoa", drop_condition=False)


def test_philox_reproduces_the_published_test_vectors():
    """Known answers of Philox4x32-10 from the Random123 distribution."""
    cases = [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        got = philox4x32(tuple(np.array([v], np.uint64) for v in counter), key)
        assert tuple(int(v[0]) for v in got) == expected


def test_draws_are_uniform_and_every_argument_changes_them():
    samples = np.arange(20000)
    base = uniforms(Stream.TEXT_ROW, seed=1, epoch=2, samples=samples, numbers=3)
    assert base.min() >= 0 and base.max() < 1
    assert abs(base.mean() - 0.5) < 0.01 and abs(base.var() - 1 / 12) < 0.005
    others = [
        uniforms(Stream.IMAGE_ROW, seed=1, epoch=2, samples=samples, numbers=3),
        uniforms(Stream.TEXT_ROW, seed=2, epoch=2, samples=samples, numbers=3),
        uniforms(Stream.TEXT_ROW, seed=1 + 2**32, epoch=2, samples=samples, numbers=3),
        uniforms(Stream.TEXT_ROW, seed=1, epoch=3, samples=samples, numbers=3),
        uniforms(Stream.TEXT_ROW, seed=1, epoch=2, samples=samples, numbers=4),
        np.roll(base, 1),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


def test_text_rate_is_one_uniform_number_per_sample(make):
    """Share masked over many samples has the mean and spread of U(0.3, 0.8), not of a common rate."""
    sample = lay(make, make.text_sample(0, 2, 399))
    noised = noise_layouts([sample] * 400, NoiseConfig(), make.spec, seed=0, epoch=0, indices=range(400))
    shares = np.array([n.noised[sample.supervisable].mean() for n in noised])
    assert abs(shares.mean() - 0.55) < 0.02
    assert abs(shares.std() - 0.5 / np.sqrt(12)) < 0.015
    assert shares.min() > 0.2 and shares.max() < 0.9


@pytest.mark.parametrize(("kind", "mean"), [("cosine", 2 / np.pi), ("uniform", 0.5)])
def test_image_share_follows_its_distribution_without_replacement(make, kind, mean):
    sample = lay(make, make.t2i_sample(0, 2, side=10))
    noise = NoiseConfig(image_ratio=kind)
    noised = noise_layouts([sample] * 600, noise, make.spec, seed=0, epoch=0, indices=range(600))
    counts = np.array([n.noised.sum() for n in noised])
    assert counts.min() >= 1 and counts.max() <= 100
    assert abs(counts.mean() / 100 - mean) < 0.04
    rows = np.mean([n.noised for n in noised], axis=0)[sample.supervisable]
    assert rows.std() < 0.05  # no row is favoured


def test_a_fixed_image_ratio_masks_exactly_its_floor(make):
    sample = lay(make, make.t2i_sample(0, 2, side=3))
    noise = NoiseConfig(image_ratio="uniform", image_ratio_range=(0.5, 0.5))
    assert {int(apply_noise(sample, noise, make.spec, key=(0, 0, i)).noised.sum()) for i in range(50)} == {4}


def test_every_answer_keeps_at_least_one_masked_row(make):
    """Also at rate 0: an answer without signal would be computed for nothing."""
    none = NoiseConfig(text_sigma=(0.0, 0.0), image_ratio="uniform", image_ratio_range=(0.0, 0.0))
    turns = [make.text(0, [1]), make.text(1, [2]), make.text(2, [3]), make.image(3, [[1, 2]] * 4, 2, 2)]
    layout = lay(make, make.sample(*turns))
    for index in range(30):
        noised = apply_noise(layout, none, make.spec, key=(0, 0, index)).noised
        assert [int(noised[layout.turn_ids == turn].sum()) for turn in range(4)] == [0, 1, 0, 1]


def test_masked_rows_hold_the_mask_and_their_label_everything_else_is_untouched(make):
    """Newlines, prompts, begin and end ids and the clean memory are never masked; all codebooks go together."""
    turns = [
        make.image(0, [[5, 6]], 1, 1),
        make.text(1, [2, 3, 4]),
        make.text(2, [3]),
        make.image(3, [[1, 2]] * 9, 3, 3),
    ]
    layout = lay(make, make.sample(*turns))
    for index in range(30):
        got = apply_noise(layout, NoiseConfig(), make.spec, key=(3, 1, index))
        hit = got.noised
        assert not (hit & ~layout.supervisable).any()
        assert (got.labels[hit] == layout.ids[hit]).all() and (got.labels[~hit] == -100).all()
        assert (got.input_ids[~hit] == layout.ids[~hit]).all()
        masks = np.where(layout.type_ids == 3, TEXT_MASK, IMAGE_MASK)
        assert (got.input_ids[hit] == masks[hit][:, None]).all()
    assert not (layout.supervisable & (layout.is_clean | (layout.ids[:, 0] == 51))).any()


def test_noise_changes_with_seed_epoch_and_sample_and_repeats_otherwise(make):
    layout = lay(make, make.text_sample(0, 2, 63))
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    patterns = [apply_noise(layout, NoiseConfig(), make.spec, key=key).noised for key in keys]
    for i, pattern in enumerate(patterns):
        assert (apply_noise(layout, NoiseConfig(), make.spec, key=keys[i]).noised == pattern).all()
        for other in patterns[:i]:
            assert (pattern != other).any()


def test_noise_of_a_sample_does_not_depend_on_its_pack(make):
    samples = [make.text_sample(3, 2, 9), make.t2i_sample(7, 4), make.text_sample(1, 1, 30), make.t2i_sample(4, 1, 5)]
    layouts = [lay(make, sample) for sample in samples]
    together = noise_layouts(layouts, NoiseConfig(), make.spec, seed=5, epoch=2)
    for layout, noised in zip(layouts, together, strict=True):
        alone = apply_noise(layout, NoiseConfig(), make.spec, key=(5, 2, layout.sample_index))
        assert noised.layout is layout
        assert (noised.input_ids == alone.input_ids).all() and (noised.labels == alone.labels).all()


def test_noise_leaves_the_layout_as_it_is(make):
    layout = lay(make, make.t2i_sample(0, 4))
    before = layout.ids.copy()
    apply_noise(layout, NoiseConfig(), make.spec, key=(0, 0, 0))
    assert (layout.ids == before).all()
