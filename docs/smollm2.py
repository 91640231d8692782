"""The parts of docs/smollm2.sh that are Python.

python docs/smollm2.py convert GGUF FOLDER      # a quantised model as a folder of transformers, fp32
python docs/smollm2.py compare FOLDER [RUN]     # logits and loss on real text, here and in transformers
"""

import json
import os
import sys
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers

import ropewalk
from data.text import stdlib_files

TEXTS, TOKENS = ("shlex.py", "_strptime.py", "dis.py", "pty.py"), 512


def convert(source: Path, folder: Path) -> None:
    """Dequantise; what is lost on the way to GGUF is put back."""
    options = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**options)
    pre = tokenizers.pre_tokenizers  # GGUF names its steps alone, "smollm", and transformers reads it as GPT-2's
    steps = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


@torch.inference_mode()
def compare(folder: str, run: str) -> None:
    """Print the largest difference of logits over their standard deviation, and the losses, of each text."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(folder), ropewalk.load(run)
    files = dict(stdlib_files())
    for name in TEXTS:
        text = files[name].read_text()
        ids = ours.encode(text)[: TOKENS + 1]
        assert ids.tolist() == tokenizer(text)["input_ids"][: TOKENS + 1], "other tokens"
        here, there = ours.net(ids[None, :-1])[0], theirs(ids[None, :-1]).logits[0]
        error = (here - there).abs().max() / there.std()
        losses = [float(F.cross_entropy(logits, ids[1:])) for logits in (here, there)]
        print(f"{name}: logits differ by {error:.1e} of their spread; loss {losses[0]:.5f} here, {losses[1]:.5f} there")
        assert error < 1e-3, "the models differ"
    start = tokenizer("def factorial(n):", return_tensors="pt")
    written = theirs.generate(**start, max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(written) == "def factorial(n):" + ours.generate("def factorial(n):", 20, temperature=0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        compare(sys.argv[2], sys.argv[3])
