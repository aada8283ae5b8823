"""Rows of every task against tables written by hand from spec §2 (D6, T6, T13)."""

import numpy as np
import pytest

from lumina_ft.config.schema import NoiseConfig
from lumina_ft.data.layout import Layout, layout_prefix, layout_sample, sample_length
from lumina_ft.data.noise import apply_noise
from lumina_ft.data.segments import Kind, Role, Segment
from lumina_ft.errors import DataError

EVERYTHING = NoiseConfig(text_sigma=(1.0, 1.0), image_ratio="uniform", image_ratio_range=(1.0, 1.0))
SYS, END_SYS, USER, UNCOND, END_USER = 201, 202, 203, 204, 205
BOA, EOA, BOI, EOI, BO3D, EO3D, BOV, EOV, PAD = 209, 210, 211, 212, 213, 214, 215, 216, 217
NL = (51, 51)


def lay(make, sample, *, tail="eoa", drop=False, block=4):
    layout = layout_sample(sample, make.spec, block_tokens=block, answer_tail=tail, drop_condition=drop)
    length = sample_length(sample, block_tokens=block, answer_tail=tail, drop_condition=drop)
    assert length == len(layout)
    return layout


def check(make, layout: Layout, table: list[tuple]) -> None:
    """Compare with rows of (ids, type, clean, turn, block, position, label kept)."""
    ids = [row[0] if isinstance(row[0], tuple) else (row[0],) * 2 for row in table]
    assert layout.ids.tolist() == [list(row) for row in ids]
    got = [layout.type_ids, layout.is_clean, layout.turn_ids, layout.block_ids, layout.position_ids]
    assert list(zip(*(field.tolist() for field in got), strict=True)) == [
        (kind, bool(clean), turn, block, position) for _, kind, clean, turn, block, position, _ in table
    ]
    # With every supervisable row masked, labels are exactly the answers.
    noised = apply_noise(layout, EVERYTHING, make.spec, key=(0, 0, 0))
    labels = [ids[i] if row[6] else (-100, -100) for i, row in enumerate(table)]
    assert noised.labels.tolist() == [list(row) for row in labels]
    assert noised.noised.tolist() == [bool(row[6]) for row in table]


def test_text_qa_table(make):
    sample = make.sample(make.text(0, [11, 12], system=True), make.text(0, [21]), make.text(1, [31, 32, 33, 34]))
    prefix = [(i, 1, 1, 0, -1, p, 0) for p, i in enumerate([SYS, 11, 12, END_SYS, USER, 21, END_USER])]
    answer = [31, 32, 33, 34, EOA, EOA, EOA, EOA]
    noisy = [(i, 3, 0, 1, j // 4, 8 + j, 1) for j, i in enumerate(answer)]
    memory = [(i, 3, 1, 1, j // 4, 8 + j, 0) for j, i in enumerate(answer)]
    check(make, lay(make, sample), [*prefix, (BOA, 1, 0, 1, 0, 7, 0), *noisy, *memory])


@pytest.mark.parametrize(
    ("tail", "answer"),
    [("eoa", [31, EOA, EOA, EOA]), ("pad", [31, EOA, PAD, PAD]), ("short", [31, EOA])],
)
def test_answer_tail_policies(make, tail, answer):
    layout = lay(make, make.sample(make.text(0, [21]), make.text(1, [31])), tail=tail)
    assert layout.ids[4 : 4 + len(answer), 0].tolist() == answer
    assert layout.ids[4 + len(answer) :, 0].tolist() == answer
    assert layout.supervisable.sum() == len(answer)


def test_an_answer_that_fills_its_block_with_eoa_has_no_tail(make):
    layout = lay(make, make.sample(make.text(0, [21]), make.text(1, [31, 32, 33])))
    assert layout.ids[4:8, 0].tolist() == [31, 32, 33, EOA] and len(layout) == 4 + 8


def test_understanding_table(make):
    image = make.image(0, [[1, 2], [3, 4]], 1, 2)
    sample = make.sample(image, make.text(0, [21]), make.text(1, [31]), task="understand")
    prefix = [
        (USER, 1, 1, 0, -1, 0, 0),
        (BOI, 1, 1, 0, -1, 1, 0),
        ((1, 2), 2, 1, 0, -1, 2, 0),
        ((3, 4), 2, 1, 0, -1, 3, 0),
        (NL, 2, 1, 0, -1, 4, 0),
        (EOI, 1, 1, 0, -1, 5, 0),
        (21, 1, 1, 0, -1, 6, 0),
        (END_USER, 1, 1, 0, -1, 7, 0),
        (BOA, 1, 0, 1, 0, 8, 0),
    ]
    answer = [31, EOA, EOA, EOA]
    noisy = [(i, 3, 0, 1, 0, 9 + j, 1) for j, i in enumerate(answer)]
    memory = [(i, 3, 1, 1, 0, 9 + j, 0) for j, i in enumerate(answer)]
    check(make, lay(make, sample), [*prefix, *noisy, *memory])


def image_answer(codes, width, turn, start):
    """BOA, BOI, grid of one codes row per entry, EOI, EOA; newline rows carry no label."""
    rows = [(BOA, 1, 0, turn, 0, start, 0), (BOI, 1, 0, turn, 0, start + 1, 0)]
    for i, code in enumerate(codes):
        rows.append((code, 4, 0, turn, 0, start + len(rows), 1))
        if (i + 1) % width == 0:
            rows.append((NL, 4, 0, turn, 0, start + len(rows), 0))
    return [*rows, *((i, 1, 0, turn, 0, start + len(rows) + j, 0) for j, i in enumerate((EOI, EOA)))]


GRID = [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_text_to_image_table(make):
    sample = make.sample(make.text(0, [21, 22]), make.image(1, GRID, 2, 2), task="t2i")
    prefix = [(i, 1, 1, 0, 0, p, 0) for p, i in enumerate([USER, 21, 22, END_USER])]
    check(make, lay(make, sample), prefix + image_answer(GRID, 2, 1, 4))


def test_text_to_image_without_condition(make):
    system = make.text(0, [11], system=True)
    sample = make.sample(system, make.text(0, [21, 22]), make.image(1, GRID, 2, 2), task="t2i")
    prefix = [(i, 1, 1, 0, 0, p, 0) for p, i in enumerate([SYS, 11, END_SYS, USER, UNCOND, END_USER])]
    check(make, lay(make, sample, drop=True), prefix + image_answer(GRID, 2, 1, 6))


def test_condition_drop_leaves_text_answers_alone(make):
    sample = make.sample(make.image(0, [[1, 2]], 1, 1), make.text(0, [21]), make.text(1, [31]))
    assert (lay(make, sample, drop=True).ids == lay(make, sample).ids).all()


def edit_sample(make):
    return make.sample(make.image(0, [[9, 8]], 1, 1), make.text(0, [21]), make.image(1, GRID, 2, 2), task="edit")


def test_edit_table(make):
    rows = [(USER, 1), (BOI, 1), ((9, 8), 2), (NL, 2), (EOI, 1), (21, 1), (END_USER, 1)]
    prefix = [(i, kind, 1, 0, 0, p, 0) for p, (i, kind) in enumerate(rows)]
    check(make, lay(make, edit_sample(make)), prefix + image_answer(GRID, 2, 1, 7))


def test_condition_drop_of_an_edit_also_drops_the_source_image(make):
    prefix = [(i, 1, 1, 0, 0, p, 0) for p, i in enumerate([USER, UNCOND, END_USER])]
    check(make, lay(make, edit_sample(make), drop=True), prefix + image_answer(GRID, 2, 1, 3))


def test_multi_turn_table_continues_positions_and_ends_with_all_memories(make):
    sample = make.sample(make.text(0, [21]), make.text(1, [31]), make.text(2, [22]), make.text(3, [32, 33, 34, 35]))
    users = [(i, 1, 1, 0, -1, p, 0) for p, i in enumerate([USER, 21, END_USER])]
    first = [31, EOA, EOA, EOA]
    later = [(i, 1, 1, 2, -1, 8 + p, 0) for p, i in enumerate([USER, 22, END_USER])]
    second = [32, 33, 34, 35, EOA, EOA, EOA, EOA]
    table = [
        *users,
        (BOA, 1, 0, 1, 0, 3, 0),
        *((i, 3, 0, 1, 0, 4 + j, 1) for j, i in enumerate(first)),
        *later,
        (BOA, 1, 0, 3, 0, 11, 0),
        *((i, 3, 0, 3, j // 4, 12 + j, 1) for j, i in enumerate(second)),
        *((i, 3, 1, 1, 0, 4 + j, 0) for j, i in enumerate(first)),
        *((i, 3, 1, 3, j // 4, 12 + j, 0) for j, i in enumerate(second)),
    ]
    check(make, lay(make, sample), table)


def test_multi_turn_metadata_equals_the_golden_pack(make):
    """First segment of the backbone case of golden set A: same turns, lengths and blocks of four."""
    lengths = (2, 8, 3, 6)
    sample = make.sample(*(make.text(turn, list(range(n))) for turn, n in enumerate(lengths)))
    layout = lay(make, sample, tail="short")
    positions = [*range(27), *range(5, 14), *range(20, 27)]
    turns = [0] * 4 + [1] * 10 + [2] * 5 + [3] * 8 + [1] * 9 + [3] * 7
    blocks = "----0000011112-----00000111" + "000011112" + "0000111"
    types = "11111333333333" + "111111" + "3333333" + "3" * 16
    assert layout.position_ids.tolist() == positions
    assert layout.turn_ids.tolist() == turns
    assert layout.block_ids.tolist() == [-1 if b == "-" else int(b) for b in blocks]
    assert layout.type_ids.tolist() == [int(t) for t in types]
    assert layout.is_clean.tolist() == [True] * 4 + [False] * 10 + [True] * 5 + [False] * 8 + [True] * 16


def test_only_an_earlier_image_answer_gets_a_memory(make):
    first, second = [(1, 2), (3, 4)], [(5, 6)]
    sample = make.sample(
        make.text(0, [21]), make.image(1, first, 1, 2), make.text(2, [22]), make.image(3, second, 1, 1), task="edit"
    )
    table = [
        *((i, 1, 1, 0, 0, p, 0) for p, i in enumerate([USER, 21, END_USER])),
        *image_answer(first, 2, 1, 3),
        *((i, 1, 1, 2, 0, 10 + p, 0) for p, i in enumerate([USER, 22, END_USER])),
        *image_answer(second, 1, 3, 13),
        *((i, 4, 1, 1, 0, 5 + j, 0) for j, i in enumerate([*first, NL])),
    ]
    check(make, lay(make, sample), table)


def test_video_rows_go_by_columns_one_three_two(make):
    """Two frames of two lines: a line is one value of column 3, 5004 ends a line, 5005 a frame (here 54, 55)."""
    coords = [[0, t, fast, line, 0] for line in (1, 0) for fast in (1, 0) for t in (1, 0)]
    codes = [[8 * t + 2 * line + fast, 0] for _, t, fast, line, _ in coords]
    video = make.medium(0, Kind.VIDEO, codes, coords)
    layout = lay(make, make.sample(video, make.text(1, [31]), task="video"))
    line, frame = 54, 55
    expected = [0, 1, line, 2, 3, line, frame, 8, 9, line, 10, 11, line, frame]
    assert layout.ids[:17, 0].tolist() == [USER, BOV, *expected, EOV]
    assert layout.type_ids[:17].tolist() == [1, 1, *[2] * len(expected), 1]


@pytest.mark.parametrize("columns", [3, 5])
def test_3d_rows_go_by_z_then_y_then_x(make, columns):
    """5002 ends each (z, y) run, 5003 a layer after it (here 52, 53)."""
    places = [(2, 1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 3), (1, 1, 0)]
    codes = {(0, 0, 0): 1, (1, 0, 0): 2, (1, 1, 0): 3, (2, 1, 0): 4, (0, 0, 3): 5}
    coords = [[0, 1, *p] if columns == 5 else [*p] for p in places]
    cloud = make.medium(0, Kind.OBJECT_3D, [[codes[p], 0] for p in places], coords)
    layout = lay(make, make.sample(cloud, make.text(1, [31]), task="3d"))
    expected = [1, 2, 52, 3, 4, 52, 53, 5, 52, 53]
    assert layout.ids[:13, 0].tolist() == [USER, BO3D, *expected, EO3D]


def test_prefix_stops_before_boa(make):
    sample = make.sample(make.text(0, [11], system=True), make.text(0, [21]), make.text(1, [31, 32]))
    prefix = layout_prefix(sample, make.spec, negative="none")
    training = lay(make, sample)
    size = len(prefix)
    assert training.ids[size, 0] == BOA and prefix.next_position == training.position_ids[size]
    assert prefix.next_turn == 1 and prefix.is_clean.all() and not prefix.supervisable.any()
    for name in ("ids", "type_ids", "position_ids", "turn_ids", "block_ids", "is_clean"):
        assert (getattr(prefix, name) == getattr(training, name)[:size]).all(), name


def test_prefix_needs_no_answer_and_its_negative_drops_text_and_media(make):
    sample = make.sample(make.text(0, [11], system=True), make.image(0, [[9, 8]], 1, 1), make.text(0, [21]))
    assert layout_prefix(sample, make.spec, negative="none").ids[3:, 0].tolist() == [
        USER,
        BOI,
        9,
        51,
        EOI,
        21,
        END_USER,
    ]
    negative = layout_prefix(sample, make.spec, negative="uncondition")
    assert negative.ids[:, 0].tolist() == [SYS, 11, END_SYS, USER, UNCOND, END_USER]


def test_prefix_of_a_later_turn_holds_the_clean_memory_at_training_positions(make):
    """Every row of the prefix is a clean row of the training layout; BOA and noisy rows are left out."""
    turns = [make.text(0, [21]), make.text(1, [31]), make.text(2, [22]), make.text(3, [32])]
    prefix = layout_prefix(make.sample(*turns[:3]), make.spec, negative="none", block_tokens=4)
    assert prefix.ids[:, 0].tolist() == [USER, 21, END_USER, 31, EOA, EOA, EOA, USER, 22, END_USER]
    assert prefix.position_ids.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert prefix.turn_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert prefix.next_position == 11 and prefix.next_turn == 3
    training = lay(make, make.sample(*turns))
    names = ("ids", "type_ids", "position_ids", "turn_ids", "block_ids", "is_clean")
    rows = {tuple(np.concatenate([np.ravel(getattr(training, n)[i]) for n in names])) for i in range(len(training))}
    for i in range(len(prefix)):
        assert tuple(np.concatenate([np.ravel(getattr(prefix, n)[i]) for n in names])) in rows


def bad_samples(make):
    user, answer = make.text(0, [21]), make.text(1, [31])
    grid = make.image(1, GRID, 2, 2)
    two = [(0, 0, 0, 0, 0), (0, 0, 0, 0, 0)]
    return {
        "no user turn": make.sample(),
        "ends with a user turn": make.sample(user),
        "USER segment with turn 2 after 0 turns": make.sample(make.text(2, [21]), answer),
        "ASSISTANT segment with turn 1 after 0": make.sample(answer, user),
        "USER segment with turn 0 after 2": make.sample(user, answer, user),
        "USER segment with turn 1": make.sample(user, Segment(Role.USER, 1, Kind.TEXT, user.text_ids, user.codes)),
        "system TEXT segment after 1 turns": make.sample(user, make.text(0, [11], system=True), answer),
        "empty text answer in turn 1": make.sample(user, make.text(1, [])),
        "answer of text, image": make.sample(user, answer, grid),
        "answer of image, image": make.sample(user, grid, grid),
        "answer of video": make.sample(user, make.medium(1, Kind.VIDEO, [[1, 2]], [two[0]])),
        "id 209 at text token 1": make.sample(make.text(0, [21, BOA]), answer),
        "id -3 at text token 0": make.sample(user, make.text(1, [-3])),
        "code 32 at media row 1, codebook 0": make.sample(user, make.image(1, [[1, 2], [32, 4]], 1, 2)),
        "4 codes for an image grid": make.sample(user, make.image(1, GRID, 2, 3)),
        "codes with 3 columns": make.sample(user, make.image(1, [[1, 2, 3]], 1, 1)),
        "a medium holds": make.sample(user, make.image(1, np.zeros((0, 2)).tolist(), 0, 0)),
        "coordinates of shape": make.sample(make.medium(0, Kind.VIDEO, [[1, 2]], [[0, 0, 0]]), answer),
        "two codes at coordinates": make.sample(make.medium(0, Kind.VIDEO, [[1, 2], [3, 4]], two), answer),
        "several batch ids": make.sample(
            make.medium(0, Kind.OBJECT_3D, [[1, 2], [3, 4]], [two[0], (1, 0, 0, 0, 0)]), answer
        ),
    }


def test_bad_samples_are_refused_with_file_and_line(make):
    for message, sample in bad_samples(make).items():
        with pytest.raises(DataError) as caught:
            lay(make, sample)
        assert message in str(caught.value), message
        assert str(caught.value).startswith("rows.jsonl:7 — ")
