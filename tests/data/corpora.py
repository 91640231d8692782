"""Small corpora and vocabularies for the tests of the data."""

import base64
import random

import numpy as np

import data.base


def write_corpus(folder, documents=40, seed=0):
    """Text files of different lengths, some with odd text, one empty, one that is not UTF-8."""
    rng = random.Random(seed)
    words = ["rope", "walk", "é", "漢", "<|endoftext|>", "\r\n", "  ", "0123"]
    for i in range(documents):
        path = folder / f"part{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(rng.choices(words, k=rng.randrange(5, 300)))
        path.write_bytes(f"{i} {text}".encode())
    latin = " ".join(f"caf\xe9 {i}" for i in range(20))
    (folder / "latin.txt").write_bytes(latin.encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    return folder


def prepared(folder, cache, kind="TextFiles", **options):
    """The corpus in `folder` as a source, or another one of data.text, prepared."""
    common = {
        "_target_": f"data.text.{kind}",
        "name": "text",
        "cache_dir": str(cache),
        "val_fraction": 0.2,
    }
    if folder:
        common["files"] = f"{folder}/**/*.txt"
    source = data.base.build_data(common | options)
    source.prepare()
    return source


def documents_of(source, name):
    """The texts of a split, from the files alone."""
    split = source.prepared[name]
    documents = np.split(split.stream(), split.offsets[1:-1])
    texts = []
    for document in documents:
        *ids, end = document.tolist()
        assert end == source.encoder.eot
        texts.append(source.decode(ids))
    return texts


def write_vocabulary(path, merges=(b"th", b"the", b" the"), skip=0):
    """A vocabulary file: the single bytes, then `merges` from rank 256 + skip on."""
    ranks = {bytes([i]): i for i in range(256)}
    for i, piece in enumerate(merges):
        ranks[piece] = 256 + skip + i
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items()]
    path.write_text("".join(lines))
    return str(path)
