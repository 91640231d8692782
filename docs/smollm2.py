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
    """Dequantise a GGUF file, and restore what the conversion to GGUF lost."""
    options = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**options)
    # GGUF only names the pre-tokenizer ("smollm"), and transformers takes it for GPT-2's, which keeps digits together.
    pre = tokenizers.pre_tokenizers
    steps = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings))


@torch.inference_mode()
def compare(folder: str, run: str) -> None:
    """Print for each text the largest difference of logits over their std, and both losses."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ropewalk.load(run)
    files = dict(stdlib_files())
    for name in TEXTS:
        text = files[name].read_text()
        ids = ours.encode(text)[: TOKENS + 1]
        their_ids = tokenizer(text)["input_ids"][: TOKENS + 1]
        assert ids.tolist() == their_ids, "other tokens"

        # The same tokens through both networks.
        inputs = ids[None, :-1]
        targets = ids[1:]
        our_logits = ours.net(inputs)[0]
        their_logits = theirs(inputs).logits[0]
        difference = (our_logits - their_logits).abs().max()
        error = difference / their_logits.std()

        our_loss = F.cross_entropy(our_logits, targets).item()
        their_loss = F.cross_entropy(their_logits, targets).item()
        print(f"{name}: logits differ by {error:.1e} of their std; loss {our_loss:.5f} here, {their_loss:.5f} there")
        assert error < 1e-3, "the models differ"

    # Greedy decoding writes the same text.
    prompt = "def factorial(n):"
    start = tokenizer(prompt, return_tensors="pt")
    written = theirs.generate(**start, max_new_tokens=20, do_sample=False)[0]
    continuation = ours.generate(prompt, 20, temperature=0)
    assert tokenizer.decode(written) == prompt + continuation


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        compare(sys.argv[2], sys.argv[3])
