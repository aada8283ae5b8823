"""JSON files that are there whole or not at all, and reading a user's with a clear error. No torch here."""

import json
import os
from pathlib import Path
from typing import Any

from lumina_ft.errors import CheckpointError


def read_json_object(path: Path, holder: str) -> dict[str, Any]:
    """Content of a JSON file that holds one object.

    Args:
        holder: what must have such a file, for the message: "a checkpoint directory".

    Raises:
        CheckpointError: missing, or not a JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} — not found — {holder} holds a {path.name} — check the path")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} — {error} — must be a JSON object — copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} — {type(content).__name__} — must be a JSON object — copy it again")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file aside, flush and rename it, so that readers see the old or the new one, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
