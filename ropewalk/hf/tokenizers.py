"""Files from which transformers builds the tokenizer of a run."""

import json
from pathlib import Path

import tokenizers

from data.hf_tokenizer import BYTE_OF, HFTokenizer, pre_tokenizer, save
from data.tokenizer import Tokenizer
from ropewalk.files import copy_files, read_json


def write(encoder: Tokenizer, folder: Path) -> None:
    """Write files from which transformers.AutoTokenizer builds the same tokenizer, with our end token as its own."""
    if not isinstance(encoder, HFTokenizer):
        # Each byte is a token, and none are merged.
        as_bytes = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_OF), []))
        as_bytes.pre_tokenizer = pre_tokenizer()
        save(as_bytes, folder)
        return
    # The export has written the config.json of the new model.
    copy_files((path for path in encoder.files if path.name != "config.json"), folder)
    config = folder / "tokenizer_config.json"
    values = read_json(config) if config.is_file() else {}
    # This class reads tokenizer.json as it is. The others build a tokenizer of their own from its vocabulary.
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    values["eos_token"] = encoder.decode([encoder.eot])
    config.write_text(json.dumps(values, indent=2))
