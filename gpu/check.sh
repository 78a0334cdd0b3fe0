#!/bin/bash
# Tries all_reduce, the hook and attach on CUDA tensors and compares with CPU results, bit for bit.
# gpu/check.sh [python]: with that interpreter (python3 if none is given), which needs a torch with
# CUDA and zensync. Exit codes: 0 all equal, 1 something differs or failed, 2 there is no GPU.
set -u
cd "$(dirname "$0")/.." || exit 1
exec "${1:-python3}" gpu/check.py
