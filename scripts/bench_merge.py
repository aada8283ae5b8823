"""Time `lumina-ft merge-lora` against a plain copy of the same files, in the same run, and watch its memory.

    python scripts/bench_merge.py --base out/big --adapter out/big-adapter --work out --json

Each round copies the base and merges it, with and without verification. Both sides end with an fsync of every file. The
base lies in the page cache (`--cache warm`, read just before each measurement), or not (`cold`). Anonymous memory is
what the process itself holds; mapped files belong to the page cache.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

_CHUNK_BYTES = 64 << 20
_SETTLE_SECONDS = 5.0
"""Virtual machines give freed memory back to their host within seconds, and filling it anew costs far more than writing
to memory that was freed just now, as a copy that starts at once would."""


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def set_cache(directory: Path, cache: str) -> None:
    """Bring all files of a directory into the page cache, or out of it."""
    os.sync()
    for path in files_of(directory):
        with path.open("rb") as stream:
            if cache == "cold":
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(_CHUNK_BYTES):
                    pass


def copy(source: Path, target: Path) -> None:
    """Copy a directory's files as fast as the system can, and wait until they are on the disk."""
    target.mkdir(parents=True)
    for path in files_of(source):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as stream:
            os.fsync(stream.fileno())


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def merge(base: Path, adapter: Path, output: Path, options: list[str]) -> tuple[dict, int]:
    """Run the command; returns its JSON and its largest anonymous memory in bytes."""
    command = [sys.executable, "-m", "lumina_ft", "merge-lora", "--base", str(base), "--adapter", str(adapter)]
    process = subprocess.Popen(
        [*command, "--output", str(output), "--json", *options], stdout=subprocess.PIPE, text=True
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"merge-lora exited with {process.returncode}: {out}")
    return json.loads(out.splitlines()[-1]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="outputs are written here and deleted")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--options", default="", help="further options of merge-lora, such as '--layout packed'")
    args = parser.parse_args()
    num_bytes = sum(path.stat().st_size for path in files_of(args.base))
    seconds: dict[str, list[float]] = {"copy": [], "merge": [], "merge_verified": []}
    inside: dict[str, list[float]] = {"merge": [], "merge_verified": []}
    peaks = [0]
    for _ in range(args.rounds):
        for name in seconds:
            output = args.work / f"bench-{name}"
            shutil.rmtree(output, ignore_errors=True)
            set_cache(args.base, args.cache)
            time.sleep(_SETTLE_SECONDS)
            start = time.monotonic()
            if name == "copy":
                copy(args.base, output)
            else:
                verify = ["--verify"] if name == "merge_verified" else ["--no-verify"]
                result, peak = merge(args.base, args.adapter, output, [*args.options.split(), *verify])
                peaks.append(peak)
                inside[name].append(result["seconds"])
            seconds[name].append(time.monotonic() - start)
            shutil.rmtree(output)
            print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr)
    rate = {name: num_bytes / 1e6 / median(values) for name, values in seconds.items()}
    summary = {
        "gb": round(num_bytes / 1e9, 3),
        "cache": args.cache,
        "fsync": "every file, both sides",
        "rounds": args.rounds,
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "mb_per_second": {name: round(value, 1) for name, value in rate.items()},
        "merge_over_copy": round(rate["merge"] / rate["copy"], 3),
        "merge_verified_over_copy": round(rate["merge_verified"] / rate["copy"], 3),
        "mb_per_second_without_start_up": {n: round(num_bytes / 1e6 / median(v), 1) for n, v in inside.items()},
        "peak_anonymous_mb": round(max(peaks) / 1e6, 1),
        "lowest_delta_cosine": result["lowest_delta_cosine"],
        "adapted": result["adapted"],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
