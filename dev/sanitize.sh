#!/bin/sh
# The kernels' tests on a GPU under compute-sanitizer, which finds reads and writes outside of what was allocated.
#
#     dev/sanitize.sh [memcheck|racecheck|initcheck|synccheck] [pytest arguments]
#
# The tool comes with the CUDA toolkit. Its exit code is 0 if all tests passed and nothing was found. Every access is
# watched, so tests take many times as long: name some of them (-k seal) where minutes count, or run files side by side.
# Processes that tests start, such as compilers, are not watched, nor are workers of pytest -n.
set -eu
cd "$(dirname "$0")/.."

tool=memcheck
case "${1:-}" in memcheck | racecheck | initcheck | synccheck) tool=$1 && shift ;; esac

sanitizer=
for found in "$(command -v compute-sanitizer || true)" /usr/local/cuda*/bin/compute-sanitizer \
    /usr/local/cuda*/compute-sanitizer/compute-sanitizer /opt/nvidia/*/*/compute-sanitizer; do
    if [ -x "$found" ]; then sanitizer=$found && break; fi
done
if [ -z "$sanitizer" ]; then
    echo "error: compute-sanitizer is neither on the PATH nor under /usr/local/cuda*; install the CUDA toolkit" >&2
    exit 2
fi

# Blocks of torch's own allocator hide what lies behind a tensor; the tool does not work through an MPS server.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MPS_PIPE_DIRECTORY=/nonexistent
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # side by side, a thread per core each would wait for one another
case "${1:--}" in -*) set -- tests/attend/kernels tests/models/test_fused_layers.py tests/pages/kernels tests/score/kernels "$@" ;; esac
exec "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 \
    "${PYTHON:-python3}" -m pytest -x -p no:cacheprovider "$@"
