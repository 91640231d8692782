"""Files from which transformers builds the tokenizer of a run."""

from pathlib import Path

import tokenizers

from conf.files import copy_files, read_json, write_json, write_text
from data.hf_tokenizer import CHARACTER_OF, HFTokenizer, pre_tokenizer
from data.tokenizer import Tokenizer


def write(encoder: Tokenizer, folder: Path, *, bos: int | None = None) -> None:
    """Write files from which transformers.AutoTokenizer builds the same tokenizer, with our end token as its own.

    Args:
        bos: the token that it is to put before each text, if any.
    """
    config = folder / "tokenizer_config.json"
    if isinstance(encoder, HFTokenizer):
        # The export has written the config.json of the new model.
        copy_files((path for path in encoder.files if path.name != "config.json"), folder)
        values = read_json(config) if config.is_file() else {}
        values["add_bos_token"] = bos is not None
        if bos != encoder.own_bos:
            _put_before_texts(folder / "tokenizer.json", bos)
    else:
        _backend(encoder).save(str(folder / "tokenizer.json"))
        # No token is put at the start. llama.cpp would put one there unless it is told.
        values = {"clean_up_tokenization_spaces": False, "add_bos_token": False}
    # This class reads tokenizer.json as it is. The others build a tokenizer of their own from its vocabulary.
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": encoder.decode([encoder.eot])}
    write_json(config, values)


def _put_before_texts(path: Path, bos: int | None) -> None:
    """Let the tokenizer in a file put this token before each text. Versions of transformers read other settings."""
    backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    token = "" if bos is None else backend.id_to_token(bos)
    template = tokenizers.processors.TemplateProcessing(
        single=f"{token} $A".strip(),
        pair=f"{token} $A {token} $B".replace("  ", " ").strip(),
        special_tokens=[] if bos is None else [(token, bos)],
    )
    backend.post_processor = template
    write_text(path, backend.to_str(pretty=True))


def _backend(encoder: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer of the library `tokenizers` with a vocabulary of tiktoken's kind."""
    ranks = encoder.ranks
    names = {token: token.decode("latin-1").translate(CHARACTER_OF) for token in ranks}

    # tiktoken joins any two neighbours whose union is a token, the lowest rank first. The library wants a list of
    # pairs: each way to cut a token into two tokens is one, in the order of the tokens' ranks.
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ranks and right in ranks:
                merges.append((names[left], names[right]))

    vocab = {names[token]: rank for token, rank in ranks.items()}
    end = encoder.decode([encoder.eot])
    # `add_special_tokens` gives the end token the next free id. If its id is another one, it must be in the vocabulary;
    # otherwise it must not be, as text that looks like it could then be encoded as it.
    if encoder.eot != len(vocab):
        vocab[end] = encoder.eot
    # With `ignore_merges` a piece that is a token is not merged from its bytes, as in tiktoken.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizer(encoder.pattern)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([end])
    return backend
