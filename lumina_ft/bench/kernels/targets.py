"""What the kernels should reach at published sizes on a data-centre GPU of the H200's kind."""

from typing import Any, NamedTuple


class _Target(NamedTuple):
    """A figure of one side, or its ratio to another's, with a bound.

    Attributes:
        figure: of `triton`. over: side whose figure is divided by it; None: the figure itself.
        bound: at most, or at least for a ratio.
    """

    operation: str
    case: str
    figure: str
    over: str | None
    bound: float


_TARGETS = (
    _Target("moe", "frozen", "forward_ms", None, 1.2),
    _Target("moe", "frozen", "backward_ms", None, 1.3),
    _Target("moe", "full", "backward_ms", None, 2.6),
    _Target("moe", "frozen", "forward_ms", "torch", 1.5),
    _Target("attention", "text", "forward_ms", None, 0.25),
    _Target("attention", "text", "backward_ms", None, 1.0),
    _Target("attention", "text", "forward_ms", "sdpa", 10.0),
    _Target("attention", "text", "backward_ms", "sdpa", 10.0),
)


def check_targets(contests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets that these results say something about.

    Returns:
        Per target `what`, `value`, `bound`, `met`.
    """
    sides = {(contest["operation"], contest["case"]): contest["sides"] for contest in contests}
    checked: list[dict[str, Any]] = []
    for target in _TARGETS:
        of_case = sides.get((target.operation, target.case), {})
        own = of_case.get("triton", {}).get(target.figure)
        other = of_case.get(target.over or "triton", {}).get(target.figure)
        if own is None or other is None:
            continue
        value = own if target.over is None else other / own
        what = f"{target.operation}, {target.case}: {target.figure}"
        checked.append(
            {
                "what": what if target.over is None else f"{what} of {target.over} / triton",
                "value": value,
                "bound": target.bound,
                "met": value <= target.bound if target.over is None else value >= target.bound,
            }
        )
    return checked
