"""What `lumina-ft bench` can't measure is refused on the command line."""

import pytest

from lumina_ft.bench import lora
from lumina_ft.models.experts import PackedExperts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moe", "--top-k", 9, "--experts", 3), "error: --top-k — 9 — must not exceed --experts=3"),
        (("moe", "--hidden", 6), "error: --hidden — 6 — must be a multiple of 4, as float32 rows need — use 4"),
        (("moe", "--width", 9), "error: --width — 9 — must be a multiple of 4, as float32 rows need — use 8"),
        (("lora", "--hidden", 20), "error: --hidden — 20 — must be a multiple of 8, as bfloat16 rows need — use 16"),
        (
            ("kernels", "--operation", "mow"),
            "error: --operation — 'mow' — must be one of moe, attention, router, cross-",
        ),
        (("kernels", "--size", "huge"), "error: --size — 'huge' — must be one of real, small, tiny"),
        (
            ("step", "--case", "demos"),
            "error: --case — 'demos' — must be one of demo, experts, tiny, real; did you mean",
        ),
        (("lora", "--width", 12), "error: --width — 12 — must be a multiple of 8, as bfloat16 rows need — use 8"),
    ],
)
def test_what_cant_be_measured_is_refused(run, arguments, message):
    code, _, err = run("bench", *arguments)
    assert code == 2 and message in err and "Traceback" not in err


def test_a_layer_can_have_any_hidden_size_that_rows_can_have():
    """Attention, which isn't measured, can't divide small or odd ones among its heads."""
    layer = lora._layer(lora.LoraCase(tokens=1, hidden=8, width=8, experts=1, top_k=1, rank=1))
    assert isinstance(layer, PackedExperts) and layer.gate_proj.shape == (1, 8, 8)
