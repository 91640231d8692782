"""A run under lm-evaluation-harness scores as its export does under the harness's own model of transformers."""

import json

import pytest
import torch
import yaml

pytest.importorskip("lm_eval", reason="the extra lm_eval is not installed")

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from scripts import export, harness

TASKS = {
    "choose": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "continue": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["r"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path):
    """Local tasks over texts that are shorter and longer than the models read."""
    rows = []
    for i in range(6):
        text = f"{i} knots in a rope; " * (1 + 3 * (i % 2))
        rows.append({"text": text.strip(), "choices": [" knots", f" {i}", " in a rope"], "answer": i % 3})
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    for name, options in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}}}
        text = yaml.safe_dump({"task": name, "test_split": "test"} | data | options)
        (tmp_path / f"{name}.yaml").write_text(text)
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_scores_are_those_of_the_export_under_the_harness(straight, script, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    run = straight("pe=rope")
    assert script(export, f"run={run}", f"out={tmp_path / 'out'}").code == 0
    scored = []
    for model in (harness.Run(str(run)), HFLM(pretrained=str(tmp_path / "out"), device="cpu", dtype="float32")):
        assert model.max_length == 16
        found = evaluator.simple_evaluate(model, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0)
        answers = {}
        for name, samples in found["samples"].items():
            answers[name] = [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        scored.append((found["results"], answers))
    (ours, our_answers), (theirs, their_answers) = scored
    assert our_answers["continue"] == their_answers["continue"]
    for name in TASKS:
        for metric, value in theirs[name].items():
            if isinstance(value, float):
                assert ours[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


@pytest.mark.parametrize(
    "reading", [{}, {"pe": "yarn", "scale": 8.0}, {"pe": "dynamic_ntk", "scale": 8.0}, {"pe": "rerope"}]
)
def test_a_reading_in_chunks_scores_as_one_pass(straight, monkeypatch, reading):
    check_chunks(straight("pe=rope"), monkeypatch, reading)


@pytest.mark.parametrize("name", ["cope", "path", "fox", "stick_breaking", "selective_rope", "rnope_swa"])
def test_an_encoding_read_in_chunks_scores_as_one_pass(straight, monkeypatch, name):
    check_chunks(straight(f"pe={name}", "trainer.max_steps=1"), monkeypatch, {})


def check_chunks(run, monkeypatch, reading):
    """Chunks that divide neither the text nor the targets give the log-probabilities of the network's own forward."""
    model = harness.Run(str(run), max_length=100, **reading)
    text = model.tok_encode("5 knots in a rope; " * 6)[:101]
    context, continuation = text[:64], text[64:]
    net = model.net
    with torch.inference_mode(), net.at_scale(net.scale_for(100)):
        logits = net(torch.tensor([text[:-1]]))[0, 63:, : net.vocab_size].double()
    expected = logits.log_softmax(-1)[range(37), continuation].sum()

    monkeypatch.setattr(harness, "CHUNK", 7)
    monkeypatch.setattr("model.gpt.MAX_LOGITS", 5 * net.head.out_features)
    ((logprob, is_greedy),) = model._loglikelihood_tokens([(("", ""), context, continuation)])
    assert logprob == pytest.approx(float(expected), abs=1e-5 * 37)
    assert is_greedy == bool((logits.argmax(-1) == torch.tensor(continuation)).all())
