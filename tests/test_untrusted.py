"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import http.server
import json
import pickle
import threading
from pathlib import Path

import datasets
import pytest
import torch
from conftest import edit, snapshot

from data.base import build_data
from scripts import evaluate, sample

QUICK = ("trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


# test_fuzz.py damages every file; here the reason must be said.
DAMAGES = {
    "model.json is missing: has the run finished training?": lambda run: (run / "model.json").unlink(),
    "is not what it was trained on (tokenizer)": lambda run: (run / "data.json").write_text("{}"),
    "has format 9, but this version reads 2": lambda run: edit(run / "model.json", format=9),
    "pe.bass: no such key": lambda run: edit(run / "model.json", "pe", bass=3),
}


@pytest.fixture
def stranger(trained):
    """A run from elsewhere."""
    return trained("pe=rope", *QUICK, name="base")


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_run_is_named_with_the_reason(stranger, script, message):
    DAMAGES[message](stranger)
    assert message in script(sample, f"run={stranger}", "prompt=a", code=2).err


@pytest.fixture
def mark(tmp_path):
    """The file that a bomb makes, as is proved here."""
    path = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(path)))
    path.unlink()
    yield path
    assert not path.exists()


@pytest.mark.parametrize(
    ("section", "target"), [("data", "os.system"), ("data", "subprocess.run"), ("pe", "pathlib.Path.touch")]
)
def test_a_hostile_configuration_runs_nothing(stranger, script, section, target):
    """Nor does one in model.json, which has no data."""
    edit(stranger / "config.yaml", section, _target_=target)

    assert target in script(evaluate, f"run={stranger}", code=2).err

    if section == "pe":
        edit(stranger / "model.json", section, _target_=target)
        assert target in script(sample, f"run={stranger}", code=2).err


SOURCES = {
    "a builder of pickles": {"path": "pandas", "data_files": "{folder}/rows.json"},
    "a builder of any code": {"path": "generator"},
    "a folder with a script": {"path": "{folder}"},
    "an address": {"path": "json", "data_files": "{server}/rows.json"},
    "an address in a list": {"path": "parquet", "data_files": ["memory://a", "{server}/rows.json"]},
    "a chain of protocols": {"path": "owner/name", "data_files": "simplecache::{server}/rows.json"},
    "a path out of a dataset": {"path": "owner/name", "data_files": "../../{folder}/rows.json"},
    "an id with an address": {"path": "{server}/name"},
}


@pytest.fixture
def server():
    """The address of a server that notes each request."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
    assert not requests


@pytest.mark.parametrize("kind", SOURCES)
def test_the_data_of_a_run_run_nothing_and_send_no_request(stranger, script, mark, server, tmp_path, kind):
    """`datasets` would open pickles, scripts and any address, which of them depends on its version."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "rows.json").write_bytes(pickle.dumps(Bomb(mark)))
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    options = json.loads(json.dumps(SOURCES[kind]).replace("{folder}", str(folder)).replace("{server}", server))
    data = {"name": "hf", "_target_": "data.text.HuggingFace", "tokenizer": "bytes"} | options
    edit(stranger / "config.yaml", data=data)

    assert "error: data." in script(evaluate, f"run={stranger}", f"cache_dir={tmp_path / 'other'}", code=2).err


@pytest.fixture
def hub(monkeypatch):
    """Lets a dataset of the hub be local files, as its own README names them: {"path": format, "data_files": path}."""
    load = datasets.load_dataset_builder

    def install(**files):
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: load(**files))

    return install


@pytest.mark.parametrize("kind", ["pandas", "json"])
def test_a_dataset_of_the_hub_runs_nothing_either(hub, capsys, monkeypatch, mark, tmp_path, kind):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    path = tmp_path / "rows"
    rows = [{"text": f"row {i}", "more": i} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    if kind == "pandas":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    hub(path=kind, data_files=str(path))
    source = build_data(
        {
            "_target_": "data.text.HuggingFace",
            "name": "hf",
            "path": f"owner/{kind}",
            "cache_dir": str(tmp_path / "cache"),
        }
    )

    if kind == "pandas":
        with pytest.raises(ValueError, match="its files are pandas, but only these can be read: parquet"):
            source.prepare()
    else:
        source.prepare()
        assert sum(split.documents for split in source.prepared.values()) == 40
    assert f"data: fetching owner/{kind} from the Hugging Face hub" in capsys.readouterr().out


def test_a_strangers_run_says_what_it_reads(stranger, script, tmp_path):
    other = tmp_path / "mine"
    other.mkdir()
    for number in range(9):
        (other / f"{number}.conf").write_text(f"text {number}")
    edit(stranger / "config.yaml", "data", files=f"{other}/*.conf")

    outcome = script(evaluate, f"run={stranger}", f"cache_dir={tmp_path / 'other'}", code=2)

    assert f"data: reading 9 files such as {other}" in outcome.out


def test_a_tag_of_yaml_runs_nothing(stranger, script, mark):
    with (stranger / "config.yaml").open("a") as file:
        file.write(f"\nseed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    assert "config.yaml cannot be read" in script(evaluate, f"run={stranger}", code=2).err


def test_a_hostile_file_of_weights_runs_nothing(stranger, train, mark):
    (stranger / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    assert "model.safetensors cannot be read" in train(f"init_from={stranger}", "name=child", code=2).err


def test_a_hostile_checkpoint_runs_nothing(stranger, train, mark):
    (stranger / "training.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, stranger / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "name=base", *QUICK)
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 1" in outcome.out


SECRET = "hunter" * 3  # written so, it does not stand in the diff of this file, which a run keeps


def test_a_strangers_run_reads_no_variable_of_the_environment(stranger, train, script, monkeypatch):
    """What it holds would be in folders, pages and uploads that are published."""
    monkeypatch.setenv("SECRET", SECRET)
    text = "${oc.env:SECRET}"
    edit(stranger / "model.json", "pe", name=text)
    edit(stranger / "config.yaml", "pe", name=text)
    edit(stranger / "config.yaml", "eval", variants=[{"pe": "yarn", "name": f"yarn {text}"}])

    script(evaluate, f"run={stranger}")
    train(f"init_from={stranger}", *QUICK)
    for path, content in snapshot(train.runs).items():
        assert SECRET not in str(path)
        assert SECRET.encode() not in content, path
