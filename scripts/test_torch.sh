#!/usr/bin/env bash
# The Python tests that touch torch, with another version of it, in an environment of its own under
# build/torch-VERSION (several GB where pip's torch carries CUDA). Kept, so a second run is quick.
#
#   scripts/test_torch.sh VERSION [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?which version of torch, e.g. 2.14.1}
shift
venv=build/torch-$version
need_gb=20
tests=(tests/python/test_{all_reduce,attach,check,clip,compat,debug,device,fsdp,gather_rows,groups,hook}*.py
  tests/python/test_{matrix_,observe,reduce_scatter,state,torch_,zero_example}*.py)

python=${ZENSYNC_SETUP_PYTHON:-.venv/bin/python}
[ -x "$python" ] || { echo "no $python: run make setup first" >&2; exit 1; }
if [ ! -e "$venv/installed" ]; then
  mkdir -p build
  free_gb=$(df --output=avail -BG build | tail -n 1 | tr -dc 0-9)
  if [ "$free_gb" -lt $need_gb ]; then
    echo "$free_gb GB free, torch $version may need $need_gb" >&2
    exit 1
  fi
  "$python" -m venv --clear "$venv"
  # All other pins are those of requirements-dev.txt; demo and checks of style are left out.
  grep -vE '^(torch|tiktoken|ruff|mypy|clang-format)==|^#|^$' requirements-dev.txt >"$venv/pins.txt"
  "$venv/bin/python" -m pip install --disable-pip-version-check "torch==$version" \
    -r "$venv/pins.txt"
  touch "$venv/installed"
fi
export PATH="$PWD/$venv/bin:$PATH"
"$venv/bin/python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps \
  --force-reinstall --config-settings="build-dir=build/python-torch-$version" .
"$venv/bin/python" - "$version" <<'PYTHON'
import sys, torch
found = torch.__version__.split("+")[0]
assert found == sys.argv[1], f"asked for torch {sys.argv[1]}, got {torch.__version__}"
print("torch", torch.__version__)
PYTHON
exec "$venv/bin/python" -m pytest -rs "${tests[@]}" "$@"
