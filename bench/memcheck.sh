#!/bin/sh
# compute-sanitizer memcheck over the kernel tests: small shapes, every tensor in an allocation of its own.
#
#     bench/memcheck.sh [SUMMARY_FILE] [PYTEST_K_EXPRESSION]
#
# Writes the sanitizer's log and one JSON line to SUMMARY_FILE (default memcheck.txt). Exit code 0: no error; 1: errors
# or failed tests; 2: no compute-sanitizer or no GPU.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${1:-memcheck.txt}
select=${2:-"memcheck or (frame_kernels and (7-1-4 or 60-2-5)) or (rope_write and 16-9-3) or norms or (sampled and (whole_row or 5003))"}
python=${PYTHON:-python}

tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
for place in /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer /opt/nvidia/*/compute-sanitizer \
             "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/*/bin; do
    [ -n "$tool" ] || { [ -x "$place/compute-sanitizer" ] && tool=$place/compute-sanitizer; }
done
if [ -z "$tool" ]; then
    echo "memcheck: no compute-sanitizer here; it comes with the CUDA toolkit, or name it in COMPUTE_SANITIZER" >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "memcheck: no usable GPU here" >&2
    exit 2
fi

log=$(mktemp)
start=$(date +%s)
# Without torch's cache each tensor is its own cudaMalloc, so that a read or write past its end is seen.
env PYTORCH_NO_CUDA_MEMORY_CACHING=1 SLIPSTREAM_MEMCHECK=1 "$tool" --tool memcheck --target-processes all \
    --error-exitcode 99 --print-limit 50 --log-file "$log" \
    "$python" -m pytest -q -x -p no:cacheprovider -p no:xdist --timeout 900 -k "$select" \
    tests/gpu/test_memcheck.py tests/gpu/test_frame_kernels_gpu.py tests/gpu/test_kernels_gpu.py >"$log.tests" 2>&1
code=$?
seconds=$(($(date +%s) - start))
errors=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$log" | awk '{n += $1} END {print NR ? n : "null"}')
tests=$(tail -n 1 "$log.tests" | tr -d '"\\')
{
    cat "$log"
    tail -n 30 "$log.tests"
    printf '{"tool": "memcheck", "errors": %s, "exit_code": %s, "seconds": %s, "tests": "%s"}\n' \
        "$errors" "$code" "$seconds" "$tests"
} >"$out"
rm -f "$log" "$log.tests"
tail -n 1 "$out"
[ "$code" -eq 0 ] && [ "$errors" = 0 ] && exit 0
exit 1
