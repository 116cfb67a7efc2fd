#!/usr/bin/env bash
# Lint, format, types and tests, in this order, up to the first that fails. Arguments go to pytest:
#
#   bash scripts/test.sh                       everything
#   bash scripts/test.sh -m "not slow" tests/test_spec.py
#   TEST_WORKERS=4 bash scripts/test.sh        tests in four processes instead of two
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

stage() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  echo "== $name: $((SECONDS - start)) s"
}

stage install environment test
export PATH="$PWD/.venv/bin:$PATH"
stage lint ruff check .
stage format ruff format --check .
stage types pyright --pythonpath .venv/bin/python
stage tests python -m pytest ${TEST_WORKERS:+-n "$TEST_WORKERS"} "$@"
