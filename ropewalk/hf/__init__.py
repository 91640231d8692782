"""Interchange with transformers, through transformers itself: the optional extra `hf`, imported when it is needed.

    model = read_model("hf:FOLDER_OR_HUB_ID")      # reads its config.json
    model.describe()                               # "model", "pe", "vocab_size" and lengths, as in a run's model.json
    model.state_dict()                             # reads its weights: fp32, under the names of our network
    export(net, description, "out")                # a folder that AutoModelForCausalLM opens

No pickle is opened, no code of a folder runs, and no file is copied through a link out of it.
"""

from ropewalk.hf.read import Pretrained, read_model
from ropewalk.hf.write import export

__all__ = ["Pretrained", "export", "read_model"]
