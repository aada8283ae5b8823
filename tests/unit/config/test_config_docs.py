"""docs/config.md is what the schema says, and the schema says something about every key."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date_and_complete() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "write_config_docs.py"))["render"]()
    assert (ROOT / "docs" / "config.md").read_text() == page, "run scripts/write_config_docs.py"
    undescribed = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not undescribed
