"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import YAMLS, rows_of
from hf_models import SIZES, hf_model
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from process_helpers import On
from safetensors.torch import load_file

import ropewalk
from conf.files import read_json
from conf.options import CONF_DIR, encoding
from conf.schema import GPTConfig
from data.hf_tokenizer import BYTE_OF
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import base_model, resolve_encoding, variants
from ropewalk.evaluation.results import load_all
from ropewalk.run.directory import read_config
from scripts import evaluate


def assert_same_weights(run: Path, base: Path) -> None:
    """All that the base has, after a step at a rate of nearly 0."""
    before = load_file(base / "model.safetensors")
    after = load_file(run / "model.safetensors")
    torch.testing.assert_close({name: after[name] for name in before}, before, rtol=0, atol=1e-9)


@pytest.fixture
def extend(train):
    """`extend(base, "pe=yarn", ...)` takes one step, at a rate of nearly 0: the run's folder, and what was said."""

    def run(base, *options: str, name: str = "child") -> tuple[Path, str]:
        step = "trainer.max_steps=1", "optim.lr=1e-15"
        outcome = train(f"init_from={base}", *step, *options, f"name={name}")
        return train.runs / name, outcome.out

    return run


@pytest.fixture
def refused(train):
    """`refused(base, "model.dim=64", ...)` is the error of a run that is not begun."""

    def run(base, *options: str) -> str:
        outcome = train(f"init_from={base}", *options, "name=refused", code=2)
        assert not (train.runs / "refused").exists()
        return outcome.err

    return run


def test_two_extensions_keep_the_first_length(straight, extend):
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")
    first, _ = extend(base, "pe=yarn", "pe.scale=2", "train_len=32", "eval.lengths=[0.5,1]")
    second, _ = extend(first, "pe=yarn", "pe.scale=4", "train_len=64", "eval.lengths=[0.5,1]", name="second")
    for run in (first, second):
        config = read_config(run)
        assert (config["pe"]["base"], config["pe"]["original_len"]) == (500, 16)
        assert config["model"]["n_layer"] == 2

    assert {e.variant.scale for e in load_all(second) if e.step} == {4.0}


def losses(run: Path, step: int) -> dict[str, list]:
    """The losses of all texts by encoding, as measured after a step."""
    found = {}
    for e in load_all(run):
        if e.step == step:
            found[e.variant.pe["name"]] = [m.nats for m in e.measured]
    return found


def test_a_run_measures_the_model_it_starts_from_once(straight, train, trained):
    """As that model reads, and by the run's encoding: what a run of 0 steps measures of the same weights."""
    yarn = f"init_from={straight('pe=rope')}", "train_len=32", "eval.lengths=[1,2]", "pe=yarn", "pe.scale=2"
    none = trained(*yarn, "eval.variants=[rope]", "trainer.max_steps=0", name="none")

    assert read_json(none / "model.json")["original_len"] == 16  # without a step it stays

    child = train.runs / "child"
    with On("train.Training.fit", 1, partial(sys.exit, 9)):
        train(*yarn, "name=child", code=9)
    before = load_all(child)

    assert losses(child, step=0) == losses(none, step=0)

    for e in before:
        assert (e.step, e.train_len) == (0, 16)
        assert [m.length for m in e.measured] == [16, 32, 64]  # the model's own training length first

    resumed = train(*yarn, "name=child")

    assert resumed.out.count("measuring lengths") == 1, resumed.err  # after the last step
    assert [e for e in load_all(child) if not e.step] == before


@pytest.mark.parametrize(
    ("options", "readings"),
    [
        (["pe=nope", "pe.window=0.25"], ["nope"]),  # four tokens, which stay four
        (["pe=nope", "pe.temperature=log"], ["nope", "nope"]),  # from 16 tokens on, and from 32
        (["pe=yarn", "pe.scale=2"], ["yarn", "yarn at scale 2"]),  # trained at scale 1
        (["pe=dca"], ["dca", "dca extended"]),  # trained as RoPE
    ],
)
def test_a_longer_run_measures_its_model_as_it_was_trained_and_as_the_run_reads_it(straight, extend, options, readings):
    base = straight(*options)
    child, _ = extend(base, "train_len=32", "eval.lengths=[0.25,0.5,1,2,4]")
    (trained,) = [e for e in load_all(base) if not e.variant.zero_shot]
    before = [e for e in load_all(child) if e.step == 0]

    assert sorted(e.variant.label for e in before) == readings
    (as_trained,) = [e for e in before if e.variant.zero_shot == (len(before) > 1)]
    assert [m.nats for m in as_trained.measured] == [m.nats for m in trained.measured]
    lines = {*ropewalk.runs(child).line}
    assert sum(line.startswith("model before") for line in lines) == len(readings)


def test_a_run_without_a_step_keeps_to_the_weights_it_began_with(train, trained):
    """Its results are theirs: the losses before the first step, and all that a run of no steps has."""
    small = "pe=rope", "eval.variants=[]", "eval.lengths=[1]"
    base = trained(*small, name="base")
    none = f"init_from={base}", "trainer.max_steps=0", *small[1:], "name=none"
    child = f"init_from={base}", "trainer.max_steps=1", *small[1:], "name=child"
    train(*none)
    with On("train.Training.fit", 1, partial(sys.exit, 9)):
        train(*child, code=9)
    begun = shutil.copytree(train.runs / "child", train.runs / "begun")
    train(*child)
    trained(*small, "trainer.max_steps=8", name="base")

    assert "is already trained" in train(*child).out

    for run in (none, (*child[:-1], "name=begun"), ("-m", *none)):
        assert f"holds earlier weights of {base}: rename or delete it" in train(*run, code=2).err
    assert not (begun / "checkpoints").exists()


HYBRID = ("pe=hybrid", "pe.pattern=[local,global]", "model.n_layer=2")


def test_positions_without_parameters_can_be_dropped(straight, extend, refused):
    """DroPE: NoPE goes on with RoPE's weights, here in one part of a pattern; the windows keep their RoPE."""
    base = straight(*HYBRID, "pe.global.pe=rope")
    child, _ = extend(base, *HYBRID, "pe.local.window=4")
    parts = read_config(child)["pe"]

    assert (parts["local"]["name"], parts["global"]["name"]) == ("rope", "nope")
    assert_same_weights(child, base)

    with_parameters = straight(*HYBRID, "pe.global.pe=fox")

    assert "cannot read weights trained with hybrid" in refused(with_parameters, *HYBRID, "pe.local.window=4")


def test_another_vocabulary_of_the_same_size_is_refused(refused, straight, tmp_path):
    """Of the bytes, in reverse."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {255 - byte}\n" for byte in range(256)]
    (tmp_path / "v.tiktoken").write_text("".join(lines))

    error = refused(straight("pe=rope"), f"data.tokenizer={tmp_path / 'v.tiktoken'}")
    assert "a vocabulary of 257 tokens, the data one of 257" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["pe=cope"], "pe=cope (CoPE) cannot read weights trained with rope (rotary, half layout, 16 channels)"),
        (["pe=rope", "pe.layout=interleaved"], "interleaved layout"),
        (["model.dim=64"], "model.dim=64 contradicts"),
        (["model=tiny"], "contradicts"),  # the program's default, but asked for
        (["model.dim=64", "init_partial=true"], "none of the weights"),
        (["init_optimizer=true", "optim=muon"], "lab.muon.Muon cannot go on with the state of torch.optim.AdamW"),
        (["data=flip_flop"], "the data one of 5"),
    ],
)
def test_what_does_not_fit_is_refused(refused, straight, options, message):
    assert message in refused(straight("pe=rope"), *options)


def test_a_pattern_is_extended_part_by_part(train, straight):
    """The local part keeps its window too, and its layers, though hybrid.yaml has others."""
    parts = ["pe.local.pe=rope", "pe.local.window=4", "pe.global.pe=rope", "+pe.global.base=500.0"]
    base = straight("pe=hybrid", "pe.pattern=[local,global]", *parts, "model.n_layer=4")
    longer = ["train_len=32", "eval.lengths=[0.5,1]", "pe=hybrid", "pe.global.pe=yarn", "+pe.global.scale=2.0"]
    pe = train_values(*train.complete(f"init_from={base}", *longer))["pe"]

    assert pe["pattern"] == ["local", "global"]
    assert pe["local"] == read_config(base)["pe"]["local"]

    assert pe["global"] == pe["global"] | {"base": 500.0, "scale": 2.0, "original_len": 16}


@pytest.mark.parametrize(
    ("given", "part", "changes"),
    [
        ("++pe.global.scale=16.0", "global", {"scale": 16.0}),
        ("+pe.local={window:8}", "local", {"window": 8}),
        ("experiment=mine", "global", {"scale": 16.0}),
        ("++pe.global.pe=rope", "global", {"name": "rope", "window": None}),
    ],
)
def test_an_option_of_a_part_holds_over_that_of_the_model(train, straight, tmp_path, given, part, changes):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\npe: {global: {scale: 16.0}}\n")
    base = straight("pe=olmo3", "pe.pattern=[local,global]", "model.n_layer=2")
    folder = f"hydra.searchpath=[file://{tmp_path}]"
    pe = train_values(*train.complete(f"init_from={base}", folder, given))["pe"]
    theirs = read_config(base)["pe"]

    assert pe[part] | {"base": 500000.0, **changes} == pe[part]
    assert pe | {part: theirs[part]} == theirs


def test_a_window_that_an_encoding_is_chosen_for_stays(train, straight):
    """The model has none: what its encoding leaves off decides nothing."""
    base = straight("pe=rope", "pe.base=500.0")
    started = train_values(*train.complete(f"init_from={base}", "pe=gemma3"))["pe"]
    (read,) = variants(base_model(str(base)), ["gemma3"])
    for pe in (started, read):
        assert [pe[part]["base"] for part in ("local", "global")] == [500.0, 500.0]
        assert [pe[part]["window"] for part in ("local", "global")] == [0.25, None]


def test_what_a_program_of_the_users_chooses_holds_over_the_model(straight, train, tmp_path, monkeypatch):
    base = straight("pe=rope", "pe.base=500.0")
    chosen = "defaults: [train, {override /pe: yarn}, _self_]\npe: {scale: 8.0}\n"
    (tmp_path / "mine.yaml").write_text(chosen)
    program = f"--config-dir={tmp_path}", "--config-name=mine"
    train(*program, f"init_from={base}", "trainer.max_steps=0", "eval.lengths=[1]", "train_len=32", "name=child")
    pe = read_config(train.runs / "child")["pe"]

    assert (pe["name"], pe["scale"], pe["base"]) == ("yarn", 8.0, 500.0)

    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = compose("train", [f"init_from={base}", "pe=yarn"])
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # no program runs, whatever ran before in this process
    with pytest.raises(ValueError, match=r"give ropewalk\.train the overrides"):
        ropewalk.train(config=config)


def test_one_encoding_takes_over_what_all_layers_have_alike():
    """Of Gemma's layers some have a window and another base: YaRN for all of them would lose these."""
    shape = GPTConfig(n_layer=6)
    net = {"model": shape.model_dump(), "train_len": 64, "original_len": 64}
    local = {"pe": "rope", "base": 500.0, "window": 4}
    differ, _ = resolve_encoding(encoding("gemma3"), shape, 64)
    alike, _ = resolve_encoding(encoding({"pe": "gemma3", "local": local, "global": local}), shape, 64)
    typed = {"pe": "yarn", "base": 700.0, "window": None}

    with pytest.raises(ValueError, match=r"differ in window .local: 0.25, global: None"):
        variants(net | {"pe": differ}, ["yarn"])
    for wrong in ({"scale": 4}, {"local": {"window": 4}}):
        with pytest.raises(ValueError, match=rf"pe\.{next(iter(wrong))} needs a _target_"):
            variants(net | {"pe": differ}, [encoding("hybrid") | wrong])
    for parts, asked, expected in ((differ, typed, (700.0, None)), (alike, "yarn", (500.0, 4))):
        (read,) = variants(net | {"pe": parts}, [asked])
        assert (read["base"], read["window"]) == expected


READINGS = [name for name in YAMLS if "near_window" in YAMLS[name]]  # that train as RoPE does


@pytest.mark.parametrize("name", READINGS)
def test_a_model_is_read_like_one_of_rope_whatever_reading_it_trained_for(name):
    """Windows that one reading chose, and its group for a scale of 4, are no options of another."""
    net = {"model": GPTConfig().model_dump(), "train_len": 64, "original_len": 64}
    options, _ = resolve_encoding(YAMLS[name], GPTConfig(), 64)
    others = [{"pe": other, "scale": 16.0} if "scale" in YAMLS[other] else other for other in READINGS]

    assert variants(net | {"pe": options}, others) == variants(net | {"pe": YAMLS["rope"]}, others)


def test_init_partial_names_the_weights_that_are_new(straight, extend):
    base = straight("pe=rope")
    child, said = extend(base, "init_partial=true", "pe=cope", "model.n_layer=2")

    assert "initialised at random: blocks.0.position.table, blocks.1.attn.out.weight, " in said
    assert_same_weights(child, base)


def test_an_extension_begins_where_the_base_model_ended(straight, extend):
    """Where AdamW's averages hardly change in a step, they are those of the first run, and it counts its steps."""
    base = straight("pe=cope", "pe.npos_max=20", "data.bos=none")
    child, _ = extend(base, "init_optimizer=true", "optim.beta1=0.999999999", "optim.beta2=0.999999999")

    assert read_config(child)["pe"]["npos_max"] == 20  # inherited with the encoding
    assert read_config(child)["data"]["bos"] == "none"  # and with the tokenizer
    assert_same_weights(child, base)

    assert rows_of(child)[-1]["val/loss"] == pytest.approx(rows_of(base)[-1]["val/loss"], rel=1e-6)

    before = torch.load(base / "checkpoints" / "step=6.ckpt")["optimizer"]
    after = torch.load(child / "checkpoints" / "step=1.ckpt")["optimizer"]
    for name, value in before.items():
        expected = value + 1 if name.endswith("/step") else value
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-9)


def test_a_run_carries_the_vocabulary_trained_for_it(train, trained, extend, tmp_path):
    """So it is read, and extended, when the corpus, and what was prepared of it, are gone."""
    base = trained("data.tokenizer=train:268", name="base")
    ids = ropewalk.load(base).encode("knots in a rope").tolist()

    assert len(ids) < 10

    for i, path in enumerate(sorted(train.corpus.iterdir())):
        other = path.rename(path.with_suffix(".md"))
        other.write_text(f"{i} walks on a rope; " * 40)
    shutil.rmtree(tmp_path / "cache")
    child, _ = extend(base, f"data.files={train.corpus}/*.md")
    for run in (base, child):
        assert ropewalk.load(run).encode("knots in a rope").tolist() == ids


def test_the_same_data_are_split_as_those_of_the_model(straight, train):
    """What is typed holds; text of another class has its own split."""
    base = straight("pe=rope", "data.val_fraction=0.4", "data.documents=mask", "data.bos=none")
    start = f"init_from={base}", "trainer.max_steps=1"
    files = f"data.files={train.corpus}/*.txt"
    for options, expected in {
        ("data=text", files): (0.4, "mask"),
        ("data=text", files, "data.val_fraction=0.2", "data.documents=cross"): (0.2, "cross"),
        ("data=code",): (0.1, "cross"),
    }.items():
        data = train_values(*start, *options)["data"]
        assert (data["val_fraction"], data["documents"]) == expected


def small_llama(folder, vocab_size):
    """A Llama of transformers with random weights, and where it lies, with a tokenizer of 256 bytes and 4 others."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    sizes = SIZES | dict(vocab_size=vocab_size, max_position_embeddings=16, rope_parameters=rope)
    model = hf_model("llama", **sizes)
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_OF), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>", "<fill>", "<middle>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return model, f"hf:{folder}"


def test_a_model_of_transformers_is_read_as_it_is(train, script, monkeypatch, tmp_path):
    """Without a training: it becomes a run of no steps, once. It has more tokens than its tokenizer."""
    monkeypatch.chdir(tmp_path)
    corpus = [(path.name, path) for path in train.corpus.iterdir()]
    monkeypatch.setattr("data.text.stdlib_files", lambda: corpus)
    theirs, folder = small_llama(tmp_path / "llama", vocab_size=300)
    settings = ["eval.sequences=2", "eval.lengths=[1,2]", "eval.variants=[ntk]", "device=cpu", f"cache_dir={tmp_path}"]
    script(evaluate, f"run={folder}", "measures=[lengths]", *settings)
    evaluations = load_all(tmp_path / "runs" / "llama-rope-16")

    assert {(e.variant.label, e.step) for e in evaluations} == {("rope", 0), ("ntk at scale 2", 0)}

    model = ropewalk.load(folder, cache_dir=str(tmp_path))
    idx = torch.tensor([[*b"a rope walk"]])
    with torch.no_grad():
        expected = theirs(idx).logits[0]

    torch.testing.assert_close(model.logits("a rope walk"), expected, rtol=1e-4, atol=1e-5)

    small_llama(tmp_path / "llama", vocab_size=301)
    with pytest.raises(ValueError, match=r"llama-rope-16 holds earlier weights of \S+: rename or delete it"):
        ropewalk.load(folder, cache_dir=str(tmp_path))


@pytest.mark.parametrize("train_len", [16, 32])
def test_a_model_of_transformers_is_measured_once(extend, tmp_path, train_len):
    """Its options are fewer than those of the run that reads it."""
    _, folder = small_llama(tmp_path / "llama", vocab_size=258)
    child, _ = extend(folder, f"train_len={train_len}", "eval.lengths=[1,2]", "eval.sequences=2")
    assert [e.variant.label for e in load_all(child) if e.step == 0] == ["rope"]


def test_beginning_with_a_model_of_transformers(extend, tmp_path):
    """A Llama trained elsewhere, with its own base, is extended by a recipe of its own, and keeps its tokenizer.

    As Code Llama 34B it lacks the last special tokens: no text has them, so that no embedding of them is needed.
    """
    theirs, folder = small_llama(tmp_path / "llama", vocab_size=258)
    child, _ = extend(folder, "pe=yarn", "pe.scale=2", "train_len=32")

    for options in ([], ["trainer=ddp"]):
        values = train_values(f"init_from={folder}", *options)

        assert values["optim"]["lr"] == 3e-4  # not the one of a training from scratch
        assert values["trainer"]["max_steps"] == 100

    pe = read_config(child)["pe"]

    assert (pe["base"], pe["original_len"]) == (700.0, 16)

    expected = theirs.model.embed_tokens.weight.detach()

    torch.testing.assert_close(
        load_file(child / "model.safetensors")["embedding.weight"],
        expected,
        rtol=0,
        atol=1e-9,
    )

    (tmp_path / "llama" / "tokenizer.json").unlink()
    ids = ropewalk.load(child, cache_dir=str(tmp_path)).encode("a rope")

    assert ids.tolist() == [*b"a rope"]
