#!/usr/bin/env bash
# Ten minutes of a GPU: bash lab/benchmarks/gpu.sh [NANOGPT [CORPUS]] > gpu.md
# Each part ends by itself after $LIMIT seconds, and is useful alone. $SMALLER holds options for a try on a CPU.
limit=${LIMIT:-60} python=${PYTHON:-python}
part() { # part HEADING SETTING OPTIONS...: scripts/bench.py after a setting of PyTorch
    printf '\n## %s\n\n' "$1"
    local set="import runpy, torch; $2; runpy.run_path('scripts/bench.py', run_name='__main__')"
    PYTHONPATH=scripts timeout "$limit" $python -c "$set" mode=training 'encodings=[rope]' rounds=3 "${@:3}" $SMALLER ||
        echo "ended with $?"
}
small=(model=small train_len=1024)
printf '## Exactness\n\n'
timeout $((4 * limit)) $python scripts/check_gpu.py minutes="${MINUTES:-3.5}" $CHECK || echo "ended with $?"
part 'small: a graph a layer; bare loop: one graph' 'pass' "${small[@]}"
part 'tiny' 'pass'
part 'tiny, CUDA graphs' 'import torch._inductor.config as c; c.triton.cudagraphs = True'
part 'small, loss not compiled' 'from model.gpt import GPT; GPT.loss = torch.compiler.disable(GPT.loss)' "${small[@]}"
part 'small, without cuDNN attention' 'torch.backends.cuda.enable_cudnn_sdp(False)' "${small[@]}"
part 'small beside others' 'pass' mode=peers nanogpt="${1:-null}" "${small[@]}"
part 'tiny beside others' 'pass' mode=peers nanogpt="${1:-null}"
if [ -n "$2" ]; then
    printf '\n## Predictions at 11M\n\n'
    TRAIN="$python train.py" timeout $((8 * limit)) bash docs/log/prediction.sh "$2" >&2 || echo "ended with $?"
    $python -m lab.board.prediction runs/prediction
fi
exit 0
