#!/bin/sh
# Every check that needs a GPU, in at most eight minutes, on a machine that may have nothing but torch, Triton,
# transformers and pytest.
#
#   scripts/gpu_check.sh --wheels DIR     on a machine with a network: fetch what a bare one may lack, at most 64 MiB
#   scripts/gpu_check.sh [--with DIR] [--output FILE]
#                                         tests marked gpu, benchmarks at real sizes, training steps at real width;
#                                         FILE (gpu_check.json) is rewritten after each
#   scripts/gpu_check.sh --rehearse ...   the same steps in miniature on a CPU, kernels interpreted
#
# Exits with 1 if anything failed. PYTHON names the interpreter, python3 by default.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# Pure Python, so they fit any machine; later releases of typer need pydantic, which isn't. Liger is a peer in the
# benchmarks, the others run tests and commands.
PACKAGES="liger-kernel>=0.8.5 pytest pytest-timeout pytest-xdist execnet iniconfig pluggy packaging pygments
typer==0.24.* click rich markdown-it-py mdurl shellingham annotated-doc"
LIMIT_KIB=65536

wheels="" with=""
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a directory}; shift 2 ;;
        --with) with=${2:?--with needs a directory}; shift 2 ;;
        *) break ;;
    esac
done

if [ -n "$wheels" ]; then
    [ ! -e "$wheels" ] || [ -z "$(ls -A "$wheels")" ] || { echo "$wheels — holds files — must be new — use another" >&2; exit 2; }
    # No file name may match the pattern in it.
    set -f
    # shellcheck disable=SC2086  # a list of names
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" $PACKAGES
    size=$(du -sk "$wheels" | cut -f1)
    echo "$wheels: $size KiB" >&2
    [ "$size" -le $LIMIT_KIB ] || { echo "$wheels — $size KiB — must be at most $LIMIT_KIB — fetch fewer packages" >&2; exit 2; }
    exit 0
fi

if [ -n "$with" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" \
        "$with"/*.whl
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# The checkout, not an installed copy of it.
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
"$PYTHON" scripts/gpu_check.py "$@"
