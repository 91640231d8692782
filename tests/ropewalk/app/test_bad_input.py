"""What a user can get wrong ends in one message that names the key or its remedy, before anything is written."""

import subprocess
import sys
from itertools import product

import pytest
import yaml
from conftest import ROOT, snapshot

import train as program
from conf.options import CONF_DIR, comments
from ropewalk.app.compose import composed, plain, quoted
from ropewalk.app.configure import train_values

UNSAID = {"_target_", "defaults", "experiment"}
START_AT_ONCE = ("evaluate", "sample", "export", "judge", "enter", "report", "draw")

# A command line, and what the message names.
CASES = [
    ("experiment=quik", "quick"),
    ("max_steps=3", "trainer.max_steps"),
    ("+trainer.max_stepz=3", "trainer.max_steps"),
    ("optim.lr=much trainer.max_steps=-1", "optim.lr='much'"),
    ("optim.lr=much trainer.max_steps=-1", "\ntrainer.max_steps=-1"),
    ("pe=yarm pe.scale=2", "did you mean yarn?"),
    ("--optim.lr=0", "error: optim.lr=0: "),
    ("--batch_size 32", "'batch_size' is not KEY=VALUE"),
    ("seed=0,1", "seed=0,1: several values; with -m"),
    ("-m seed=0,1 --cfg=job", "leave out -m"),
    ("wandb=true", "logger=wandb"),
    ("logger.project=x", "logger=wandb"),
    ("data=code data.files=x", "data=text"),
    ("pe=rope pe.scale=4", "pe=dynamic_ntk"),
    ("-m pe=yarn,rope hydra/launcher=basik", "did you mean basic?"),
    ("hydra.run.dir=elsewhere", "runs_dir"),
    ("++hydra.run.dir=elsewhere", "runs_dir"),
    ("hydra.sweep.dir=elsewhere", "runs_dir"),
    ("-m seed=0,1 hydra.sweep.dir=elsewhere", "runs_dir"),
    ("hydra.verbose=true", "HYDRA_FULL_ERROR=1"),
    ("experiment=counting", "data=counting"),
    ("data=hf", "data.path is missing"),
    ("pe=YaRN", "did you mean yarn?"),
    ("optim.lr=${oc.env:NOTSET}", "Environment variable 'NOTSET' not found"),
    ("model.dim=128 model.n_head=3", "model.n_head=2"),
    # huge and infinite numbers
    ("eval.lengths=[1e30]", "eval.lengths"),
    ("optim.lr=inf", "optim.lr=inf"),
    ("pe=yarn pe.scale=1e300", "pe.scale=1e+300"),
    ("model.n_layer=1000000000", "model.n_layer=1000000000"),
    ("model.dim=2000000 eval.lengths=[1]", "not enough memory"),
    # names become paths
    ("name=../up", "name='../up'"),
    ("data.name=../../escaped", "data.name='../../escaped'"),
    ("name='x\n'", r"name='x\n'"),
    # patterns and variants
    ("pe=hybrid pe.local.base=5", "++pe.local.base"),
    ("pe=hybrid pe.pattern=[local,globl]", "local, global"),
    ("pe=hybrid pe.local.scale=4", "pe=dynamic_ntk"),
    ("pe=hybrid +pe.local.bse=5", "base"),
    ("pe=hybrid pe.local.window=wide", "pe.local.window='wide'"),
    ("eval.variants=[alibi]", "alibi"),
    ("eval.variants=[{pe:yarn,scal:8}]", "scale"),
    # the data and the rest
    ("train_len=100000", "too few for one window"),
    ("eval.lengths=[0.1] eval.target_tokens=4", "eval.lengths"),
    ("pe._target_=os.system", "pe._target_='os.system'"),
    ("data._target_=data.prepare.Split", "data._target_"),
    ("pe=learned pe.scale=2 eval.lengths=[4,8]", "eval.lengths"),
    ("data=flip_flop train_len=16 eval.lengths=[1,1.0625]", "17"),
    ("trainer.positions=pose", "trainer.max_position=None"),
    ("trainer.positions=pose trainer.max_position=15", "train_len=16"),
    ("trainer.positions=random trainer.max_position=128 pe=learned", "Learned"),
    ("trainer.positions=random trainer.max_position=2147483647", "trainer.max_position=2147483647"),
    ("trainer.positions=pose trainer.max_position=99 data.documents=mask", "data.documents=mask"),
    ("trainer.deterministic=true trainer.kernels=true", "trainer.kernels=false"),
    ("trainer.replicas=2", "trainer.replicas=2"),
    ("trainer=fsdp trainer.devices=1 trainer.replicas=2", "trainer.replicas=2"),
    ("trainer.context_parallel=2", "trainer=ddp"),
    ("trainer.context_parallel=2 data.documents=mask", "data.documents=mask"),
    ("trainer.context_parallel=2 trainer.positions=pose trainer.max_position=99", "trainer.positions=pose"),
    ("trainer.context_parallel=2 model.conv=4", "model.conv"),
    ("model.key_offset=true model.head_dim=7", "model.key_offset=true"),
    ("stages=[{steps:2,train_len:12}]", "train_len=12"),
    ("stages=[{steps:4,train_len:8},{steps:2,train_len:8}]", "trainer.max_steps=6"),
    ("stages=[{steps:2,train_len:8,bse:5}]", "stages.0.bse"),
    ("stages=[{steps:2,train_len:8,pe:{bse:5}}]", "pe.base"),
    ("pe=learned stages=[{steps:2,train_len:8,pe:{original_len:8}}]", "stages"),
    ("init_optimizer=true", "init_from=RUN"),
    ("~pe", "pe=NAME"),
    ("pe={}", "pe={} changes nothing"),
    ("runs_dir=/proc/no/runs", "runs_dir=/proc/no/runs: cannot create a directory in /proc"),
    ("runs/rope-code", "KEY=VALUE"),
    ("pe=[rope,yarn]", "-m pe=rope,yarn"),
    ("--config-name=evil", "--config-name=evil: no such option"),
    ("eval.lengths=" + 900 * "[" + 900 * "]", "recursion"),
    ("init_from=hf:", "hf:OWNER/NAME"),
    ("init_from=runs/rope-train_len=32", "runs/rope-train_len=32/model.json is missing"),  # as a sweep names them
    # names of other programs, answered with ours
    ("trainer.precision=16-mixed", "bf16-mixed"),
    ("trainer.devices=[0,1]", "CUDA_VISIBLE_DEVICES"),
    ("trainer.gradient_clip_val=1", "optim.grad_clip"),
    ("trainer.accumulate_grad_batches=4", "trainer.grad_accum_steps"),
    ("trainer.val_check_interval=100", "trainer.val_every"),
    ("trainer.limit_val_batches=10", "trainer.val_tokens"),
    ("trainer.fast_dev_run=true", "experiment=quick"),
    ("debug=default", "experiment=quick"),
    ("ckpt_path=last", "init_from"),
    ("resume=true", "the same command"),
    ("callbacks=[]", "train.py"),
    ("+trainer.callbacks=[]", "train.py"),
    ("optim.name=muon", "optim=muon"),
    ("optim=sgd", "torch.optim.SGD"),
    ("optim.optimizer=adam", "torch.optim.SGD"),
    ("optim.optimizer._target_=torch.optim.SGD", "'optim.optimizer={_target_: torch.optim.SGD"),
    ("+optim.optimizer={_target_:os.system}", "is not a Optimizer class under torch.optim"),
    ("optim=muon +optim.optimizer.momentun=0.5", "momentun"),
    ("optim=muon +optim.optimizer.weight_decay=0.5", "set optim.weight_decay"),
    ("optim=muon +optim.optimizer.lr=0.5", "set optim.lr"),
    ("pe=smollm3 pe.rope.pe=sinusoidal pe.nope.pe=sinusoidal model.n_layer=4", "token embeddings"),
    ("trainer=gpu", "trainer.accelerator=gpu"),
    ("logger=neptune", "_target_"),
    ("epochs=3", "trainer.max_steps"),
    ("logger.name=foo", "name="),
    ("learning_rate=1e-3", "optim.lr"),
    ("optim.max_grad_norm=1", "optim.grad_clip"),
    ("trainer.num_train_epochs=3", "trainer.max_steps"),
    ("trainer.per_device_train_batch_size=8", "trainer.batch_size"),
    ("trainer.save_steps=100", "trainer.checkpoint_every"),
    ("trainer.strategy=deepspeed", "trainer=fsdp"),
    ("block_size=256", "train_len"),
    ("model.n_embd=384", "model.dim"),
    ("max_iters=100", "trainer.max_steps"),
    ("out_dir=out", "runs_dir"),
    ("eval_interval=10", "trainer.val_every"),
    ("model.hidden_size=64", "model.dim"),
    ("trainer.max_time=9", "trainer.time_limit"),
    ("logger=csv", "metrics.jsonl"),
    ("tags=[a]", "logger.tags"),
    ("pe=rotary", "pe=rope"),
    ("data=shakespeare", "data.files="),
    ("data=openwebtext", "data.path="),
]


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line[:60] for line, _ in CASES])
def test_a_mistake_on_the_command_line_is_named_and_nothing_written(train, line, message):
    arguments = [line] if "\n" in line else line.split()
    assert message in train(*arguments, code=2).err
    assert not train.runs.exists()


def test_a_mistake_harms_no_run(train):
    train("pe=rope", "trainer.max_steps=1", "eval.variants=[]")
    before = snapshot(train.runs)
    for mistake in ("pe.bse=1", "eval.lengths=[1000]", "data.files=/nowhere/*"):
        train("pe=rope", mistake, code=2)
    assert snapshot(train.runs) == before


def test_what_is_shown_is_what_trains(train, script):
    """Also where data bring a recipe, and a base model its architecture."""
    train("pe=rope", "trainer.max_steps=0", "eval.lengths=[1]", "eval.variants=[]", "name=base")
    for arguments in (["data=markov"], [f"init_from={train.runs}/base", "pe=yarn", "train_len=32"]):
        outcome = script(program, *arguments, "--cfg", "job")
        assert yaml.safe_load(outcome.out) == train_values(*arguments), outcome.err

    assert "optim.lr=0.003 " in script(program, "data=markov", "--help").out


def test_help_says_what_each_key_means(script, tmp_path):
    """Also in a folder of the user's, whose options are built on ours."""
    (tmp_path / "pe").mkdir()
    (tmp_path / "pe" / "mine.yaml").write_text("defaults: [rope, _self_]\nbase: 5.0 # my own base\n")
    outcome = script(program, "--config-dir", tmp_path, "pe=mine", "--help")
    meanings = {}
    for line in outcome.out.splitlines():
        if line.startswith("  ") and "=" in line:
            setting, _, meaning = line.strip().partition(" ")
            meanings[setting.partition("=")[0]] = meaning.strip()

    assert meanings["pe.base"] == "my own base"
    assert "tokens" in meanings["pe.window"]  # of nope.yaml, by way of two lists of defaults
    assert [key for key, meaning in meanings.items() if not meaning] == []


OPTION_FILES = [path for path in sorted(CONF_DIR.glob("*/*.yaml")) if path.parent.name != "experiment"]


@pytest.mark.parametrize("path", OPTION_FILES, ids=str)
def test_each_key_of_each_option_has_a_comment(path):
    group = path.parent.name
    values = yaml.safe_load(path.read_text())
    keys = values.get(group, values).keys() - UNSAID  # data bring settings of other groups, too
    assert keys <= comments(group, path.stem).keys()


WITHOUT_PYTORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv[1:] = ["keyz=1"]
sys.path.insert(0, "scripts")
runpy.run_path("{}.py", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize("program", ["train", *(f"scripts/{name}" for name in START_AT_ONCE)])
def test_a_misspelt_key_is_answered_without_importing_pytorch(program):
    """That takes seconds."""
    command = [sys.executable, "-c", WITHOUT_PYTORCH.format(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "keyz: no such key" in done.stderr


PIECES = ["\\", "'", "${oc.env:SECRET}", "${", "$", "}", " ", "\n"]


def test_text_stands_for_itself(monkeypatch):
    """All orders of three pieces that Hydra or OmegaConf read as something else."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = ["".join(pieces) for pieces in product(PIECES, repeat=3)]
    overrides = [f"+texts.t{i}={quoted(text)}" for i, text in enumerate(texts)]
    with composed("report", *overrides) as config:
        assert [*plain(config)["texts"].values()] == texts
