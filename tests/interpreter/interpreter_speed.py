"""Makes Triton's interpreter prepare `triton.language` once per launch instead of once per call of a device function.

Left alone it looks through all members of the language at every such call, `tl.zeros` and `tl.sum` included, which
takes longer than the arithmetic on the small blocks of these tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction


def install() -> None:
    """Change the interpreter of this process; calling it again changes nothing."""
    if getattr(InterpretedFunction, "prepares_once", False):
        return
    launch = GridExecutor.__call__
    prepared: set[tuple[int, ...]] = set()

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        # What a launch changes in the language it takes back at its end.
        prepared.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        languages = _languages(self.fn)
        if languages not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(languages)
        return self.rewrite()(*args, **kwargs)

    GridExecutor.__call__ = start
    InterpretedFunction.__call__ = call
    InterpretedFunction.prepares_once = True


@cache
def _languages(function: Callable[..., Any]) -> tuple[int, ...]:
    """Which modules of the language a device function sees."""
    return tuple(sorted({id(value) for value in function.__globals__.values() if value is tl or value is tl.core}))
