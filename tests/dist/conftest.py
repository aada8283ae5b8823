"""Makes this folder's helpers importable, for tests as for the rank scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
