"""Which whole parameters a rank holds while a pass runs under ZeRO-3, by DeepSpeed's rule of what it frees when."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Gathered(NamedTuple):
    """A parameter that a module reads.

    Attributes:
        numel: its elements on this rank, which count as distance.
        copied: bytes of the whole copy that lives only while it is read or about to be; 0 for a parameter that is whole
            anyway.
    """

    numel: int
    copied: int


class Read(NamedTuple):
    """A module starts.

    Attributes:
        names: parameters that it reads itself.
        keeps: of those the ones whose copy autograd keeps from here on, even if DeepSpeed frees the parameter and
            gathers it again: a linear layer saves a transposed view of its weight.
        drops: parameters whose kept copy is let go after this module's backward.
    """

    names: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()


class GatherPoint(NamedTuple):
    """Bytes at the moment when a module starts.

    Attributes:
        live: whole copies, the module's own and those that autograd keeps included.
        arriving: of those the ones that were gathered just now, which the collective holds once more.
    """

    live: int
    arriving: int


def gathered_bytes(reads: Sequence[Read], params: Mapping[str, Gathered], reuse_distance: int) -> list[GatherPoint]:
    """Follow one step, of which DeepSpeed knows the order of modules: the second one and all later ones.

    A module's parameters are freed after it, except those that another module reads within `reuse_distance`.

    Args:
        reads: modules in the order in which they start: forward, then backward.
        params: by name.
        reuse_distance: stage3_max_reuse_distance, in elements of the modules between.
    """
    live: set[str] = set()
    kept: set[str] = set()
    orphaned: set[str] = set()
    points = []
    for number, read in enumerate(reads):
        arriving = sum(params[name].copied for name in set(read.names) - live)
        live |= set(read.names)
        kept |= set(read.keeps)
        points.append(GatherPoint(sum(params[name].copied for group in (live, orphaned) for name in group), arriving))
        kept -= set(read.drops)
        orphaned -= set(read.drops)
        leaving = set(read.names) - _read_soon(reads[number + 1 :], params, reuse_distance)
        live -= leaving
        orphaned |= leaving & kept
    return points


def _read_soon(later: Sequence[Read], params: Mapping[str, Gathered], distance: int) -> set[str]:
    """Parameters that the next modules read."""
    soon: set[str] = set()
    passed = 0
    for read in later:
        if passed >= distance:
            break
        soon |= set(read.names)
        passed += sum(params[name].numel for name in read.names)
    return soon
