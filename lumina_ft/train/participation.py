"""T1: every trainable parameter takes part in the gradient collectives on every rank, or the difference is named.

Two checks, both on the first forward pass of a stage and before the collective that they protect. Module by module, the
ranks compare which one they are about to enter: under ZeRO-3 entering different ones would already fail, or hang, in
gathering their weights. Afterwards they compare which parameters will get a gradient, read off the autograd graph.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import Parameter

from lumina_ft.errors import RunError
from lumina_ft.parallel.dist import World

_MAX_LISTED = 8
_NOTHING_MORE = -1


def reached_parameters(loss: Tensor, params: Mapping[str, Parameter]) -> list[str]:
    """Names of the parameters that a backward pass from `loss` would give a gradient, in the order of `params`."""
    names = {id(param): name for name, param in params.items()}
    reached: set[str] = set()
    stack = [loss.grad_fn]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in names:
            reached.add(names[id(leaf)])
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return [name for name in params if name in reached]


def check_participation(loss: Tensor, params: Mapping[str, Parameter], world: World) -> None:
    """Compare over the ranks which trainable parameters take part. Collective.

    Args:
        loss: of the first micro-batch of a stage.
        params: trainable parameters by name.

    Raises:
        RunError: ranks differ, or a parameter takes part nowhere.
    """
    reached = reached_parameters(loss, params)
    digest = hashlib.sha256("\n".join(reached).encode()).hexdigest()
    digests = world.gather_objects(digest)
    if len(set(digests)) == 1 and len(reached) == len(params):
        return
    missing = [sorted(set(params) - set(names)) for names in world.gather_objects(reached)]
    where = "; ".join(f"rank {rank} lacks {_listed(names)}" for rank, names in enumerate(missing) if names)
    raise RunError(
        f"participation — {where} — every trainable parameter must get a gradient on every rank, whatever the pack "
        "holds — call the module on every rank (a zero-valued term will do), or freeze its group"
    )


@contextmanager
def watched_forward(model: nn.Module, world: World) -> Iterator[None]:
    """Around a stage's first forward pass: the ranks compare each module before they enter it. Collective.

    Raises:
        RunError: ranks enter different modules.
    """
    if world.size == 1:
        yield
        return
    modules = [(name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]

    def describe(index: int) -> str:
        if index == _NOTHING_MORE:
            return "nothing more"
        name, module = modules[index]
        return f"{name} ({_listed([n for n, _ in module.named_parameters(recurse=False)])})"

    def compare(index: int) -> None:
        entered = world.gather_ints(index)
        if len(set(entered)) > 1:
            where = "; ".join(f"rank {rank} calls {describe(i)}" for rank, i in enumerate(entered))
            raise RunError(
                f"participation — {where} — every rank must call the same modules in the same order, whatever the pack "
                "holds — give the module a dummy row where there is no real one"
            )

    handles = [
        # First in line, before the hook that gathers the module's weights.
        module.register_forward_pre_hook(lambda *_, index=index: compare(index), prepend=True)
        for index, (_, module) in enumerate(modules)
    ]
    try:
        yield
        compare(_NOTHING_MORE)
    finally:
        for handle in handles:
            handle.remove()


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
