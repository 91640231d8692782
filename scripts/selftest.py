"""Check whether a program reads an exported model as it was trained, by the numbers in the export's selftest.json.

python selftest.py FOLDER                                        transformers, on the export itself
python selftest.py FOLDER http://127.0.0.1:8000/v1/completions   a server that was given the export
python selftest.py FOLDER http://127.0.0.1:8080/completion       llama.cpp's server, of a GGUF made of the export
python selftest.py FOLDER URL bfloat16                           a server that computes in 16 bit

Needs nothing but Python and, without a server, transformers: copy it wherever the export goes. A server must return the
log-probabilities of the prompt (echo and logprobs of OpenAI's completions, as vLLM and SGLang do); llama.cpp's is asked
for those of each next token. It says whether the numbers are equal, else from which token on they differ, and which
setting a program that computes them has ignored.
Exit code: 0 equal, 1 different, 2 it cannot be told.
"""

import json
import math
import sys
import urllib.request
from pathlib import Path
from typing import Any

# Largest mean difference of two log-probabilities, in nats, that is rounding.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
ALL = 10**6  # tokens whose probabilities are asked for: more than a vocabulary has
USAGE = f"usage: selftest.py FOLDER [URL] [{'|'.join(TOLERANCE)}]"


def by_transformers(folder: str, tokens: list[int], n: int, dtype: str) -> list[float]:
    """Return the log-probabilities of the last `n` tokens, in nats."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), logits_to_keep=n + 1).logits[0, :-1].float()
    targets = torch.tensor(tokens[-n:])[:, None]
    logprobs = logits.log_softmax(-1).gather(1, targets)  # [n, 1]
    return logprobs[:, 0].tolist()


def by_server(url: str, tokens: list[int], n: int) -> list[float]:
    """Return the log-probabilities of the last `n` tokens, in nats, as a server of completions computes them.

    Raises ValueError: it returns none for the prompt.
    """
    models = _request(url.rsplit("/", 1)[0] + "/models")
    name = models["data"][0]["id"]
    options = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    (choice,) = _request(url, {"model": name, "prompt": tokens, **options})["choices"]
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    # One more is that of the token that the server wrote.
    if len(values) < len(tokens):
        raise ValueError(f"{url} returned {len(values)} log-probabilities for a prompt of {len(tokens)} tokens")
    return values[len(tokens) - n : len(tokens)]


def by_llama_cpp(url: str, tokens: list[int], n: int) -> list[float]:
    """Return the log-probabilities of the last `n` tokens, in nats, as the server of llama.cpp computes them."""
    # It says nothing of a prompt, but all it knows of the token that follows one.
    values = []
    for end in range(len(tokens) - n, len(tokens)):
        options = {"n_predict": 1, "temperature": 0, "n_probs": ALL}
        (following,) = _request(url, {"prompt": tokens[:end], **options})["completion_probabilities"]
        logprobs = {choice["id"]: choice["logprob"] for choice in following["top_logprobs"]}
        values.append(logprobs[tokens[end]])
    return values


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def difference(values: list[float], expected: list[float]) -> float:
    """Return the mean absolute difference."""
    # Written so that NaN is the largest difference.
    differences = [abs(a - b) for a, b in zip(values, expected, strict=True)]
    mean = sum(differences) / len(expected)
    return float("inf") if math.isnan(mean) else mean


def compare(text: dict[str, Any], values: list[float], tolerance: float) -> tuple[bool, str, set[str]]:
    """Compare what a program computed of one text.

    Args:
        text: name, tokens, the log-probabilities of its last targets, and `faults`: the same of programs that ignore a
            setting, by the fault.
        values: of the same targets.

    Returns:
        Whether they are equal, a line about it, and the faults that give these values.
    """
    title = f"{len(text['tokens'])} tokens ({text['name']})"
    if difference(values, text["logprobs"]) <= tolerance:
        return True, f"{title}: equal", set()
    first = 0  # the first target that clearly differs
    for number, (value, expected) in enumerate(zip(values, text["logprobs"], strict=True)):
        if not abs(value - expected) <= 5 * tolerance:
            first = number
            break
    token = len(text["tokens"]) - len(values) + first + 1
    line = f"{title}: differs from token {token} on, by {difference(values, text['logprobs']):.3g} nats a token"
    faults = set()
    for fault, theirs in text["faults"].items():
        if difference(values, theirs) <= tolerance:
            faults.add(fault)
    return False, line, faults


def main(arguments: list[str]) -> int:
    dtype = "float32"
    if arguments and arguments[-1] in TOLERANCE:
        *arguments, dtype = arguments
    if len(arguments) not in (1, 2):
        print(USAGE, file=sys.stderr)
        return 2
    folder, *url = arguments
    all_equal = True
    found: set[str] = set()
    try:
        texts = json.loads((Path(folder) / "selftest.json").read_text(encoding="utf-8"))["texts"]
        for text in texts:
            n = len(text["logprobs"])
            if url and url[0].endswith("/completion"):
                values = by_llama_cpp(url[0], text["tokens"], n)
            elif url:
                values = by_server(url[0], text["tokens"], n)
            else:
                values = by_transformers(folder, text["tokens"], n, dtype)
            is_equal, line, faults = compare(text, values, TOLERANCE[dtype])
            all_equal = all_equal and is_equal
            found |= faults
            print(line)
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"error: it cannot be told: {error}", file=sys.stderr)
        return 2
    if all_equal:
        print(f"equal: this program reads the model as it was trained ({dtype})")
        return 0
    for fault in sorted(found):
        print(f"different: {fault}")
    if not found:
        print("different: no fault that selftest.json knows explains it")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
