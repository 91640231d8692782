# The runs of docs/log/newer.md: an hour of one CPU core. Finished runs are skipped: run it again to resume.
set -euf
train() { python train.py -m data=markov eval.by_position=false 'eval.variants=[]' runs_dir=runs/newer "$@"; }
two="pe=hybrid pe.pattern=[local,global]" # two layers: one that carries the order, one that sees everything

for s in ${SEEDS:-0 1 2 3 4}; do
    # At commit a185de3, which had these:
    # train seed=$s pe=lerope name="lerope-s$s"
    # train seed=$s pe=scale_invariant pe.proportion=auto name="scale_invariant-s$s"
    train seed=$s pe=half_rope_nope 'pe.pattern=[local,global]' name="half_rope-nope-s$s"
    train seed=$s pe=gated_delta name="gated_delta-s$s"
    train seed=$s $two pe.local.pe=gated_delta pe.local.window=null name="gated_delta-nope-s$s"
done
