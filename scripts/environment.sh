# Sourced by the other scripts: makes .venv in the current directory, once.

# The first Python between 3.11 and 3.13 to be found; PYTHON names another one.
find_python() {
  local python
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  echo "No Python 3.11, 3.12 or 3.13 among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python}" >&2
  return 1
}

# environment [EXTRA]: .venv holds this package, its dependencies and those of the extra. Installs
# when pyproject.toml or constraints.txt have changed since the last time, else takes no time.
environment() {
  local extra=${1:-} wanted stamp
  wanted=$(cat pyproject.toml constraints.txt)
  for stamp in ".venv/installed$extra" ".venv/installedtest"; do
    if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then return; fi
  done
  local python
  if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version), then installing; this takes a minute or two."
    "$python" -m venv --clear .venv
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extra:+[$extra]}"
  printf '%s\n' "$wanted" >".venv/installed$extra"
}
