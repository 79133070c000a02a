#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 10 minutes, as one JSON: builds the ops for this machine's
# GPU, runs the op tests on it, again under compute-sanitizer and without torch's caching allocator,
# runs what a CPU cannot (CUDA graphs, streams, tensors above 2^31 elements, the simulator's results
# beside the GPU's), then times prefill, identification and decode.
#
#   bash bench/device_check.sh [RESULT.json]        (default: bench/results/GPU-NAME.json)
#
# Needs python3 with a CUDA build of torch >= 2.11, numpy, pytest and hypothesis (PYTHON names another
# interpreter), nvcc, CMake, ninja and CUTLASS' headers: where pip's nvidia-cutlass is not installed,
# CUTLASS_INCLUDE names the folder that holds cutlass/ and cute/. Nothing is downloaded. Skipped where it
# is missing: the simulator without pybind11, memcheck and racecheck without compute-sanitizer.
#
# REHEARSE=1 goes through the steps on a machine without a GPU: the same build, tests and checks, with
# the CPU kernels in place of a GPU's and, in the checks, the CUDA kernels in the simulator.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rehearse=${REHEARSE:-}
build=build/device
logs=$build/logs
mkdir -p "$logs"
rm -f "$logs"/*  # an earlier run's results would hide that a step did not end
total=600        # seconds for everything
[ -z "$rehearse" ] || total=1800

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

note() { printf '%s\t%s\t%s\n' "$@" >> "$steps"; }

# step NAME SECONDS COMMAND...: runs it within what is left of the total, keeps its log, notes its exit
# code (124: it was out of time) and seconds.
step() {
  local step_name=$1 limit=$2 start code left=$((total - SECONDS - 5))
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    note "$step_name" "not run: $total s are over" 0
    return 1
  fi
  start=$(date +%s)
  echo "== $step_name"
  timeout "$limit" "$@" > "$logs/$step_name.log" 2>&1
  code=$?
  tail -n 3 "$logs/$step_name.log"
  note "$step_name" "$code" "$(($(date +%s) - start))"
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

export -f build_ops
export python build arch
export LIGHTTRANSFER_LIBRARY=$PWD/$build/_C.so PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export LIGHTTRANSFER_CUDASIM=off  # the op tests leave the simulator out: -k cuda would select it too
op_tests=(tests/test_{state,attention,attention_lazy,attention_levels,mass,mass_arguments,kv,kv_arguments,decode,decode_arguments,unchecked_rows}.py)
pytest=("$python" -m pytest -q --maxfail=20 -p no:cacheprovider -m "not slow")
if "$python" -c 'import xdist' 2> /dev/null; then
  export OMP_NUM_THREADS=1
  pytest+=(-n "$(($(nproc) < 4 ? $(nproc) : 4))")
fi
select=cuda
[ -z "$rehearse" ] || select=cpu

build_limit=300 test_limit=120 check_limit=90
[ -z "$rehearse" ] || build_limit=900 test_limit=400 check_limit=300  # on a laptop's cores

step build "$build_limit" bash -c build_ops || { echo "device_check: the build failed, see $logs/build.log"; exit 1; }
if "$python" -c 'import pybind11' 2> /dev/null; then
  step simulator "$build_limit" "$python" tests/simulator.py
else
  note simulator "skipped: needs pybind11" 0
fi
step op_tests "$test_limit" "${pytest[@]}" -k "$select" "${op_tests[@]}"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 step op_tests_without_caching "$test_limit" "${pytest[@]}" -k "$select and not compile" "${op_tests[@]}"
if [ -n "$rehearse" ]; then
  note memcheck "skipped: a rehearsal" 0
  note racecheck "skipped: a rehearsal" 0
elif command -v compute-sanitizer > /dev/null; then
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step memcheck 90 compute-sanitizer --error-exitcode 9 --target-processes all \
    "$python" bench/device_checks.py --small
  step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$python" bench/device_checks.py --small
else
  note memcheck "skipped: needs compute-sanitizer" 0
  note racecheck "skipped: needs compute-sanitizer" 0
fi
step device_checks "$check_limit" "$python" bench/device_checks.py --json "$logs/checks.json" ${rehearse:+--rehearse}
step timings 150 "$python" bench/device_timings.py --json "$logs/timings.json" ${rehearse:+--rehearse}

"$python" bench/device_report.py --steps "$steps" --logs "$logs" --out "$result"
