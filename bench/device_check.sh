#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 10 minutes, as one JSON: builds the ops for this machine's
# GPU, runs the op tests on it, again under compute-sanitizer and without torch's caching allocator,
# runs what a CPU cannot (CUDA graphs, streams, tensors above 2^31 elements, the simulator's results
# beside the GPU's), then times prefill, identification and decode.
#
#   bash bench/device_check.sh [RESULT.json]        (default: bench/results/GPU-NAME.json)
#
# Needs: python3 with a CUDA build of torch >= 2.11 and pytest, nvcc, CMake, ninja, and CUTLASS' headers
# (pip's nvidia-cutlass, or CUTLASS_INCLUDE=FOLDER). PYTHON names another interpreter. REHEARSE=1 goes
# through every step that does not launch a kernel, on a machine without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rehearse=${REHEARSE:-}
build=build/device
logs=$build/logs
mkdir -p "$logs"

if [ -z "$rehearse" ]; then
  "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
    { echo "device_check: this torch sees no GPU (REHEARSE=1 goes through the steps without one)"; exit 1; }
  arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-"))')
else
  arch=80
  name=rehearsal
fi
result=${1:-bench/results/$name.json}
mkdir -p "$(dirname "$result")"
steps=$logs/steps.tsv
: > "$steps"

# step NAME SECONDS COMMAND...: runs it, keeps its log, notes its exit code and seconds.
step() {
  local step_name=$1 limit=$2 start code
  shift 2
  start=$(date +%s)
  echo "== $step_name"
  timeout "$limit" "$@" > "$logs/$step_name.log" 2>&1
  code=$?
  tail -n 3 "$logs/$step_name.log"
  printf '%s\t%s\t%s\n' "$step_name" "$code" "$(($(date +%s) - start))" >> "$steps"
  return $code
}

build_ops() {
  local include=${CUTLASS_INCLUDE:-}
  [ -n "$include" ] || include=$("$python" -c 'import importlib.util as u
print(u.find_spec("cutlass_library").submodule_search_locations[0] + "/source/include")') || return 1
  local nvcc
  nvcc=$(readlink -f "$(nvcc --dryrun -x cu - < /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')/bin/nvcc")
  # compute_80's PTX is in every build: it is what the simulator runs and what a newer GPU falls back on.
  local archs=80
  [ "$arch" = 80 ] || archs="80;$arch"
  cmake -G Ninja -B "$build" -DPython_EXECUTABLE="$(command -v "$python")" -DNVCC="$nvcc" \
    -DCUTLASS_INCLUDE="$include" -DCUDA_ARCHS="$archs" && cmake --build "$build"
}

export LIGHTTRANSFER_LIBRARY=$PWD/$build/_C.so PYTHONPATH=$PWD PYTHONUNBUFFERED=1
op_tests="tests/test_state.py tests/test_attention.py tests/test_mass.py tests/test_kv.py tests/test_decode.py"
pytest=("$python" -m pytest -q -x -p no:cacheprovider -m "not slow")
select=cuda
[ -z "$rehearse" ] || select=cpu

step build 300 build_ops || { echo "device_check: the build failed, see $logs/build.log"; exit 1; }
# shellcheck disable=SC2086
step op_tests 120 "${pytest[@]}" -k "$select" $op_tests
# shellcheck disable=SC2086
PYTORCH_NO_CUDA_MEMORY_CACHING=1 step op_tests_without_caching 90 "${pytest[@]}" -k "$select and not compile" $op_tests
if command -v compute-sanitizer > /dev/null && [ -z "$rehearse" ]; then
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step memcheck 90 compute-sanitizer --error-exitcode 9 --target-processes all \
    "$python" bench/device_checks.py --small
  step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$python" bench/device_checks.py --small
else
  printf 'memcheck\tskipped: no compute-sanitizer\t0\n' >> "$steps"
fi
step device_checks 90 "$python" bench/device_checks.py --json "$logs/checks.json" ${rehearse:+--rehearse}
step timings 150 "$python" bench/device_timings.py --json "$logs/timings.json" ${rehearse:+--rehearse}

"$python" bench/device_report.py --steps "$steps" --logs "$logs" --out "$result"
