"""Keys of earlier versions, so that an old file is told what to write instead of what it can't know."""

from typing import Any

from lumina_ft.config.yaml_file import Key

_KERNELS: dict[Key, dict[str, str]] = {
    ("model", "experts_impl"): {"torch": "torch", "eager": "eager"},
    ("model", "attention_impl"): {"segmented": "torch", "dense": "eager"},
}
"""Old key -> its old value -> value of `model.kernels`; other values meant what `auto` means."""


def replacement(key: Key, value: Any) -> str | None:
    """Rule and fix for a key that earlier versions had, or None for any other.

    Args:
        value: what the user wrote there.
    """
    values = _KERNELS.get(key)
    if values is None:
        return None
    rule = "model.kernels chooses for attention, experts and router together"
    now = values.get(str(value))
    return f"{rule} — {f'write model.kernels: {now} instead' if now else 'remove this key'}"
