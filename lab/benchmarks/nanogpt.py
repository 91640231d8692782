"""Print tokens/s and memory of nanoGPT's step, compiled: python lab/benchmarks/nanogpt.py FOLDER [SIZES].

SIZES is n_layer,n_head,dim,length,batch,vocabulary; without it those of `small` and of `tiny`.
"""

import runpy
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch

SIZES = ("12,12,768,1024,16,2048", "4,4,128,256,16,2048")
STEPS = 10


def main(folder: str, *sizes: str) -> None:
    """Print a line for each of `sizes`: medians of five rounds of steps on random tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nanogpt = runpy.run_path(str(Path(folder) / "model.py"), run_name="nanogpt")
    for size in sizes or SIZES:
        n_layer, n_head, dim, length, batch, vocabulary = map(int, size.split(","))
        shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": dim, "block_size": length, "vocab_size": vocabulary}
        net = nanogpt["GPT"](nanogpt["GPTConfig"](**shape, bias=False)).to(device)
        optimizer = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device)
        compiled = torch.compile(net) if device == "cuda" else net
        x, y = torch.randint(vocabulary, (2, batch, length), device=device)
        seconds = []
        for _ in range(6):
            start = perf_counter()
            for _ in range(STEPS):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    _, loss = compiled(x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss.item()  # waits for the device
            seconds.append(perf_counter() - start)
        speed = STEPS * batch * length / statistics.median(seconds[1:])
        memory = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0
        print(f"{size}: {speed:,.0f} tokens/s, {memory:,.0f} MB", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
