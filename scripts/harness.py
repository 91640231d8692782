"""EleutherAI's lm-evaluation-harness on a run, with any encoding and reading: its own command line, one model more.

python scripts/harness.py --model ropewalk --model_args run=runs/cope-code --tasks lambada_openai
python scripts/harness.py --model ropewalk --model_args run=runs/rope-code,pe=yarn,scale=8 --tasks wikitext

Needs the extra `lm_eval`. Of model_args, `run`, `pe`, `device` and options of the encoding are those of
`ropewalk.load`. max_length is the longest text in tokens, beyond which the harness cuts its beginning; default: the
training length times the scale. All texts are read at the scale that suits it, as an exported model reads them.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor

import ropewalk
from data.text import TextData
from model.generation import generate

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # `main` names the package
    TemplateLM = object

MAX_GEN_TOKS = 256  # the harness's usual number
CHUNK = 1024  # tokens that are read in one pass


class Run(TemplateLM):
    """A run as a model of the harness. Texts are read one by one.

    Args:
        run, pe, device, options: as of `ropewalk.load`.
        max_length: the longest text in tokens; None: the training length times the encoding's largest scale.
        batch_size, max_batch_size: passed by the harness, without effect.

    Raises ValueError: there is no such run, it has no tokenizer, or the encoding cannot read its weights.
    """

    def __init__(
        self, run: str, pe: str | None = None, device: str = "cpu", max_length: int | None = None,
        batch_size: Any = None, max_batch_size: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = ropewalk.load(run, pe=pe, device=device, **options)
        if not isinstance(self.model.data, TextData):
            raise ValueError(f"run={run} was trained on a task and has no tokenizer: give one that was trained on text")
        self.eot = self.model.data.encoder.eot
        self.net = self.model.net
        self._device = torch.device(device)
        longest = max(self.net.scales) * self.net.train_len
        if math.isinf(longest):  # the encoding reads any length
            longest = 2**31
        if self.net.max_len is not None:
            longest = min(longest, self.net.max_len)
        self.max_length = max_length or int(longest)

    @property
    def eot_token_id(self) -> int:
        return self.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.data.encode(string)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval import utils

        sums = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.eot_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            disjoint = [(("", ""), *utils.make_disjoint_window(window)) for window in windows]
            sums.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(disjoint)))
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations, one at a time and without padding, which no encoding can then mistake for text.

        Args:
            requests: texts, which are not read, and the tokens of context and continuation. Of what is longer than
                `max_length` the start is cut off.

        Returns:
            The log-probability of each continuation in nats, and whether greedy decoding would write it.
        """
        answers = []
        for _text, context, continuation in requests:
            tokens = (context + continuation)[-self.max_length - 1 :]
            ids = torch.tensor(tokens, device=self.device)
            n = min(len(continuation), len(ids) - 1)
            logprobs, is_greedy = self._score(ids[None, :-1], ids[None, -n:])
            answers.append((logprobs, is_greedy))
        return answers

    def _score(self, idx: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Return the log-probability of the last tokens in nats, and whether greedy decoding would write them.

        Args:
            idx: the text without its last token, int64 [1, T].
            targets: the tokens that follow its last n, int64 [1, n].
        """
        # Neither scores of all queries nor logits of all targets exist at once, so memory is linear in the length.
        cache = self.net.new_cache()
        with self.net.at_scale(self.net.scale_for(self.max_length)):
            chunks = [self.net.hidden_states(chunk, cache) for chunk in idx.split(CHUNK, dim=1)]
        hidden = torch.cat(chunks, dim=1)[:, -targets.size(1) :]  # [1, n, C]

        def score(logits: Tensor, targets: Tensor) -> tuple[float, bool]:
            logprobs = logits.log_softmax(-1)  # [1, t, vocabulary]
            of_targets = logprobs.gather(-1, targets[..., None])  # [1, t, 1]
            return float(of_targets.double().sum()), bool((logprobs.argmax(-1) == targets).all())

        pieces = self.net.in_pieces(score, hidden, targets)
        return sum(logprob for logprob, _ in pieces), all(is_greedy for _, is_greedy in pieces)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        """Continue a text greedily until one of `options["until"]`, the end of a text, or max_gen_toks tokens."""
        stops = options.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        n = int(options.get("max_gen_toks", MAX_GEN_TOKS))
        temperature = 0.0
        if options.get("do_sample"):
            temperature = float(options.get("temperature", 0))
        room = self.max_length - n
        ids = torch.tensor(self.tok_encode(context)[-room:], device=self.device)
        tokens: list[int] = []
        text = ""
        with self.net.at_scale(self.net.scale_for(self.max_length)):
            for token in generate(self.net, ids[None], n, temperature=temperature):
                if int(token) == self.eot_token_id:
                    break
                tokens.append(int(token))
                text = self.model.data.decode(tokens)
                if any(stop in text for stop in stops):
                    break
        for stop in stops:
            text = text.partition(stop)[0]
        return text


def main() -> None:
    if TemplateLM is object:
        sys.exit('error: this needs a package: pip install -e ".[lm_eval]"')
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model("ropewalk")(Run)
    cli_evaluate()


if __name__ == "__main__":
    main()
