#!/usr/bin/env bash
# Runs the op tests over a build of the CPU ops with AddressSanitizer and UndefinedBehaviorSanitizer:
#   bash tests/sanitize.sh [pytest arguments]
# A finding ends the run. Leaks are not looked for: Python and torch leave memory behind on purpose.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/sanitize
cxx=${CXX:-g++}

cmake -G Ninja -B "$build" -DPython_EXECUTABLE="$(command -v python)" -DCMAKE_CXX_COMPILER="$cxx" \
  -DSANITIZE="-fsanitize=address,undefined;-fno-sanitize-recover=undefined" >/dev/null
cmake --build "$build"

# The interpreter is not sanitized, so the runtimes come first; with them libstdc++, whose throw they intercept.
preload=
for library in libasan.so libubsan.so libstdc++.so; do preload+="$("$cxx" -print-file-name="$library") "; done

[ $# -gt 0 ] || set -- tests/test_{state,kv,kv_arguments,mass,decode,decode_arguments,attention,fuzz}.py
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
  LIGHTTRANSFER_LIBRARY="$build/_C.so" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" \
  python -m pytest -q -p no:cacheprovider -m "not slow" "$@"
