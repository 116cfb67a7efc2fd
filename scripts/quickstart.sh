#!/usr/bin/env bash
# From a fresh clone to a trained model: makes .venv, trains a small decoder on Shakespeare,
# evaluates it and lets it write. Needs Python 3.11 or later and nothing else. Started again, it
# goes on where it stopped. Arguments go to train.py:
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --workdir=runs/alibi --config.model.position=alibi
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

workdir=runs/quickstart
for argument in "$@"; do
  if [[ $argument == --workdir=* ]]; then workdir=${argument#*=}; fi
done

environment
python=.venv/bin/python
"$python" train.py --config=configs/lm.py --workdir="$workdir" "$@"
echo
echo "Evaluation on the validation split:"
"$python" eval.py --workdir="$workdir"
echo
echo "What the model writes:"
"$python" scripts/generate.py --workdir="$workdir" --prompt=$'ROMEO.\n' \
  --max_new_tokens=300 --temperature=0.8
cat <<END

The run lies in $workdir: result.json (final metrics), metrics.jsonl (all of them), config.json,
checkpoints. To try something else:
  $python train.py --config=configs/lm.py --workdir=runs/mine --config.model.position=alibi
END
