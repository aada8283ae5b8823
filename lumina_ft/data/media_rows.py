"""Order and separators of media rows (spec §2 "Media rows", §4), by column number of the coordinates.

The published names of the video columns are swapped against the encoder's axes, so rows are ordered by column index and
never by axis name: a video "line" on encoder output runs down one pixel column.
"""

import numpy as np
from numpy.typing import NDArray

from lumina_ft.data.segments import Kind, Segment
from lumina_ft.errors import DataError
from lumina_ft.tokens import MediaIds

_COORD_COLUMNS = {Kind.VIDEO: (5,), Kind.OBJECT_3D: (3, 5)}


def media_row_count(segment: Segment, where: str) -> int:
    """Rows that a medium takes in a layout: its codes and its separators, begin and end ids not counted.

    Raises:
        DataError: the medium is empty, or its shape or coordinates don't fit its codes.
    """
    num_codes = _checked_code_count(segment, where)
    if segment.kind is Kind.IMAGE:
        return num_codes + segment.shape[0]
    _, line_ends, group_ends = _order(segment, where)
    return num_codes + int(line_ends.sum()) + int(group_ends.sum())


def media_rows(
    segment: Segment, media: MediaIds, num_codebooks: int, where: str
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Rows of one medium in the order that the model reads them.

    Args:
        segment: an IMAGE (raster codes and grid shape), VIDEO or OBJECT_3D (codes and coordinates in any order).
        media: ids of the separators.
        num_codebooks: C.
        where: names the sample in messages.

    Returns:
        rows: [m, C] int32, separators repeat one id in all columns.
        is_code: [m] bool, False on separators.

    Raises:
        DataError: codes of another width or outside the codebook, or a wrong shape or wrong coordinates.
    """
    num_codes = _checked_code_count(segment, where)
    codes = segment.codes.astype(np.int32)
    if codes.shape[1] != num_codebooks:
        raise DataError(
            f"{where} — codes with {codes.shape[1]} columns — the model has {num_codebooks} codebooks — "
            "rebuild the dataset for this model"
        )
    outside = (codes < 0) | (codes >= media.codebook_size)
    if outside.any():
        row, column = (int(v) for v in np.argwhere(outside)[0])
        raise DataError(
            f"{where} — code {int(codes[row, column])} at media row {row}, codebook {column} — codes must be "
            f"below the codebook size {media.codebook_size} — rebuild the dataset with a matching codec"
        )
    if segment.kind is Kind.IMAGE:
        height, width = segment.shape
        grid = np.full((height, width + 1, num_codebooks), media.newline, np.int32)
        grid[:, :width] = codes.reshape(height, width, num_codebooks)
        is_code = np.ones((height, width + 1), np.bool_)
        is_code[:, width] = False
        return grid.reshape(-1, num_codebooks), is_code.reshape(-1)
    order, line_ends, group_ends = _order(segment, where)
    video = segment.kind is Kind.VIDEO
    line_id, group_id = (media.line_video, media.frame_video) if video else (media.line_3d, media.layer_3d)
    # A row is followed by its line separator, then by its frame or layer separator.
    after = line_ends.astype(np.int64) + group_ends
    target = np.arange(num_codes) + np.cumsum(after) - after
    rows = np.empty((num_codes + int(after.sum()), num_codebooks), np.int32)
    rows[target] = codes[order]
    rows[target[line_ends] + 1] = line_id
    rows[target[group_ends] + 2] = group_id
    is_code = np.zeros(len(rows), np.bool_)
    is_code[target] = True
    return rows, is_code


def _checked_code_count(segment: Segment, where: str) -> int:
    """Number of codes, after checking that the shape or the coordinates fit them."""
    num_codes = len(segment.codes)
    kind = segment.kind
    if segment.codes.ndim != 2 or num_codes == 0:
        raise DataError(
            f"{where} — codes of shape {segment.codes.shape} — a medium holds [n, codebooks] codes, n >= 1 — "
            "rebuild the dataset"
        )
    if kind is Kind.IMAGE:
        if len(segment.shape) != 2 or segment.shape[0] * segment.shape[1] != num_codes:
            raise DataError(
                f"{where} — {num_codes} codes for an image grid {segment.shape} — height x width must equal "
                "the number of codes — rebuild the dataset"
            )
        return num_codes
    coords, columns = segment.coords, _COORD_COLUMNS[kind]
    if coords is None or coords.ndim != 2 or len(coords) != num_codes or coords.shape[1] not in columns:
        shape = None if coords is None else coords.shape
        raise DataError(
            f"{where} — coordinates of shape {shape} for {num_codes} {kind.name} codes — one row per code "
            f"with {' or '.join(map(str, columns))} columns — rebuild the dataset"
        )
    return num_codes


def _order(segment: Segment, where: str) -> tuple[NDArray[np.intp], NDArray[np.bool_], NDArray[np.bool_]]:
    """Reading order of video or 3D codes, and whether a line, or a frame or layer, ends after each of them.

    Video: by (column 1, column 3, column 2 fastest), a line is one value of column 3. 3D: by (z, y, x fastest), a line
    is one (z, y). Video wants one batch id: column 0 has no place in the order.
    """
    coords = segment.coords
    assert coords is not None
    if coords.shape[1] == 5 and (coords[:, 0] != coords[0, 0]).any():
        raise DataError(
            f"{where} — several batch ids in column 0 of the coordinates — one medium per segment — "
            "split the token file"
        )
    if segment.kind is Kind.VIDEO:
        group, line, fast = coords[:, 1], coords[:, 3], coords[:, 2]
    else:
        fast, line, group = coords[:, -3], coords[:, -2], coords[:, -1]
    order = np.lexsort((fast, line, group))
    group, line, fast = group[order], line[order], fast[order]
    group_ends = np.append(group[1:] != group[:-1], True)
    line_ends = np.append(line[1:] != line[:-1], True) | group_ends
    repeated = ~line_ends[:-1] & (fast[1:] == fast[:-1])
    if repeated.any():
        place = coords[order[int(np.flatnonzero(repeated)[0])]].tolist()
        raise DataError(f"{where} — two codes at coordinates {place} — each place holds one code — fix the token file")
    return order, line_ends, group_ends
