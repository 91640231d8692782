"""Keys and values as other programs have them, or as ours without their section; and what each is here."""

_RESUME = "the same command resumes a run; init_from=RUN starts another one from its weights"
_NO_CALLBACKS = "there are no callbacks: the loop is `Training.fit` in train.py, where a line of yours has its place"
_ADAMW = "AdamW is the only optimizer: its keys are optim.lr, optim.weight_decay and so on"
_TRIAL = "experiment=quick is a run of seconds"
_FILES = "data=text data.files='FOLDER/**/*' reads your own files"
_JOBS = "an array of jobs of a cluster runs train.py once for each, as docs/scaling.md shows; -m trains side by side"
_HUB = "data=hf data.path=NAME reads a dataset of the hub"
_TIMEOUT = "`timeout --preserve-status 230m python train.py ...` stops it after a checkpoint"
_FP16 = "there is no fp16, whose gradients would need scaling: trainer.precision=bf16-mixed"

# Key, last word of a key, WORD=VALUE, GROUP=OPTION or WORD=TYPE -> the answer.
FOREIGN = {
    "accumulate_grad_batches": "trainer.grad_accum_steps",
    "batch_size": "trainer.batch_size",
    "batch_size_per_device": "trainer.batch_size, which counts the sequences of all processes",
    "bf16": "trainer.precision=bf16-mixed",
    "block_size": "train_len",
    "callbacks": _NO_CALLBACKS,
    "check_val_every_n_epoch": "trainer.val_every",
    "ckpt_path": _RESUME,
    "context_length": "train_len",
    "d_model": "model.dim",
    "data": "a trained model keeps its data; for others make a run of 0 steps: "
    "train.py init_from=RUN trainer.max_steps=0 data=...",
    "data=c4": _HUB,
    "data=fineweb": _HUB,
    "data=openwebtext": _HUB,
    "data=shakespeare": _FILES,
    "data=shakespeare_char": _FILES,
    "data=tinyshakespeare": _FILES,
    "data=tinystories": _HUB,
    "data=wikitext": _HUB,
    "dataset": "data=hf data.path=NAME, or data=text data.files=GLOB",
    "debug": _TRIAL,
    "default_root_dir": "runs_dir is the folder of the runs, name=... that of this one",
    "devices": "trainer.devices",
    "devices=-1": "trainer.devices=auto",
    "devices=list": "CUDA_VISIBLE_DEVICES=0,1 chooses devices, and trainer.devices=2 is their number",
    "dim": "model.dim",
    "enable_checkpointing": "trainer.checkpoint_every",
    "eval_interval": "trainer.val_every",
    "eval_iters": "trainer.val_tokens",
    "eval_steps": "trainer.val_every",
    "experiment_name": "name",
    "fast_dev_run": _TRIAL,
    "fp16": _FP16,
    "gpus": "trainer.devices",
    "gradient_accumulation_steps": "trainer.grad_accum_steps",
    "gradient_checkpointing": "trainer.checkpointing",
    "gradient_clip_val": "optim.grad_clip",
    "hidden_size": "model.dim",
    "hydra/launcher": _JOBS,
    "hydra/sweeper": "a loop of yours runs train.py, and ropewalk.runs() has the results; -m trains all combinations",
    "intermediate_size": "model.hidden_dim",
    "learning_rate": "optim.lr",
    "limit_train_batches": "trainer.max_steps",
    "limit_val_batches": "trainer.val_tokens",
    "log_interval": "trainer.log_every",
    "logger.name": "name=... names the run, everywhere",
    "logging_steps": "trainer.log_every",
    "lr": "optim.lr",
    "lr_scheduler": "optim.schedule",
    "max_epochs": "trainer.max_steps",
    "max_grad_norm": "optim.grad_clip",
    "max_iters": "trainer.max_steps",
    "max_position_embeddings": "train_len",
    "max_seq_length": "train_len",
    "max_steps": "trainer.max_steps",
    "max_time": _TIMEOUT,
    "model.pe": "pe=NAME",
    "n_embd": "model.dim",
    "n_head": "model.n_head",
    "n_layer": "model.n_layer",
    "num_attention_heads": "model.n_head",
    "num_epochs": "trainer.max_steps",
    "num_hidden_layers": "model.n_layer",
    "num_key_value_heads": "model.n_kv_head",
    "num_nodes": "torchrun and srun, which start processes on several machines, say how many there are",
    "num_train_epochs": "trainer.max_steps",
    "optim.name": _ADAMW,
    "optim=str": _ADAMW,
    "optimizer": _ADAMW,
    "out_dir": "runs_dir is the folder of the runs, name=... that of this one",
    "output_dir": "runs_dir is the folder of the runs, name=... that of this one",
    "pe": "pe=NAME chooses an encoding, which has its options then, as in pe=yarn pe.scale=8",
    "pe=absolute": "pe=learned, or pe=sinusoidal",
    "pe=none": "pe=nope",
    "pe=rotary": "pe=rope",
    "pe=sin": "pe=sinusoidal",
    "per_device_train_batch_size": "trainer.batch_size, which counts the sequences of all processes",
    "precision": "trainer.precision",
    "precision=16": _FP16,
    "precision=16-mixed": _FP16,
    "precision=16-true": _FP16,
    "precision=bf16": "trainer.precision=bf16-mixed",
    "precision=fp16": _FP16,
    "resume": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "rope_scaling": "pe=yarn pe.scale=4, or another scaling",
    "rope_theta": "pe.base",
    "run_name": "name",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "seed": "seed",
    "seed_everything": "seed",
    "strategy=ddp_find_unused_parameters_true": "trainer=ddp",
    "strategy=deepspeed": "trainer=fsdp, or trainer=ddp",
    "task_name": "name",
    "tensorboard": "logger=tensorboard",
    "time_limit": _TIMEOUT,
    "train_len": "train_len",
    "trainer.logger": "logger=wandb, or another",
    "val_check_interval": "trainer.val_every",
    "vocab_size": "data.tokenizer decides it, as in data.tokenizer=train:4096",
    "wandb": "logger=wandb",
    "warmup_iters": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps",
}


def answer(key: str, value: object = None) -> str:
    """Return what a foreign key, or a foreign value of a key of ours, is here, to be added to a message."""
    word = key.rpartition(".")[2]
    names = [key, word] if value is None else [f"{word}={value}", f"{word}={type(value).__name__}"]
    # FOREIGN["train_len"] is train_len: it helps whoever wrote trainer.train_len, and nobody else.
    answers = [FOREIGN[name] for name in names if name in FOREIGN and FOREIGN[name] != key]
    return f"; here it is so: {answers[0]}" if answers else ""
