#!/usr/bin/env bash
# Make a trained model read four times as far: train, read zero-shot, fine-tune, look for a needle, export. From a fresh
# clone,
#
#     python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[hf]'
#     bash docs/walk.sh
#
# takes under 10 minutes on two CPU cores. Everything is written to $RUNS; run again, it continues where it was
# interrupted. Arguments go to both trainings, as in `bash docs/walk.sh seed=1 model=llama_tiny`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
runs=${RUNS:-runs}
length=${LENGTH:-128} # tokens of the first training's sequences
steps=${STEPS:-600}

say() { printf '\n== %s\n' "$*"; }

say "Train with RoPE at $length tokens: beyond them it breaks"
"$python" train.py pe=rope train_len="$length" trainer.max_steps="$steps" eval.sequences=32 \
    runs_dir="$runs" name=walk-rope "$@"

say "Zero-shot: the same weights read by other encodings, at four times the length, without training"
"$python" scripts/evaluate.py run="$runs/walk-rope" 'eval.lengths=[1,2,4]' 'eval.variants=[linear,ntk,yarn]'

say "Fine-tune with YaRN at $((4 * length)) tokens, for a twentieth of the steps"
"$python" train.py init_from="$runs/walk-rope" pe=yarn pe.scale=4 train_len=$((4 * length)) \
    trainer.max_steps=$((steps / 20)) trainer.batch_size=4 optim.lr=5e-4 optim.warmup_steps=3 \
    'eval.lengths=[0.25,0.5,1,2]' eval.sequences=32 runs_dir="$runs" name=walk-yarn "$@"

say "Ask for a number in far text: a model this small, trained this briefly, finds none"
"$python" scripts/evaluate.py run="$runs/walk-yarn" 'measures=[ruler]' 'ruler.tasks=[niah_single]' 'eval.lengths=[2]' \
    ruler.trials=10

say "Export: a folder that transformers opens"
[ -e "$runs/walk-hf" ] || "$python" scripts/export.py run="$runs/walk-yarn" out="$runs/walk-hf"
echo "transformers.AutoModelForCausalLM.from_pretrained('$runs/walk-hf') reads $((4 * length)) tokens"
