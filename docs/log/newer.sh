# The runs of docs/log/newer.md: ninety minutes of one CPU core. Finished runs are skipped: run it again to resume.
set -euf
train() { python train.py -m data=markov eval.by_position=false 'eval.variants=[]' runs_dir=runs/newer "$@"; }
two="pe=hybrid pe.pattern=[local,global]" # two layers: one that carries the order, one that sees everything

for s in ${SEEDS:-0 1 2 3 4}; do
    # At commit a185de3, which had these:
    # train seed=$s pe=lerope name="lerope-s$s"
    # train seed=$s pe=scale_invariant pe.proportion=auto name="scale_invariant-s$s"
    train seed=$s pe=half_rope_nope 'pe.pattern=[local,global]' name="half_rope-nope-s$s"
    # train seed=$s pe=lerope optim.pe_lr_scale=10 name="lerope-rate-10-s$s"
    train seed=$s pe=gated_delta name="gated_delta-s$s"
    train seed=$s pe=gated_delta model.conv=4 name="gated_delta-conv-s$s"
    train seed=$s $two pe.local.pe=gated_delta pe.local.window=null name="gated_delta-nope-s$s"
done

# What they are compared with, from other pages.
of() { python scripts/report.py folders="docs/results/$1.parquet" "only=$2" out="runs/newer-$1.parquet"; }
of markov '[fox-*,window-nope-*,rope-markov*]'
of why '[p_rope-auto-ssmax-*]'
of conv '[fox-*]'
python scripts/report.py 'folders=[runs/newer,runs/newer-markov.parquet,runs/newer-why.parquet,runs/newer-conv.parquet]' \
    out=docs/results/newer.parquet
