# The runs of docs/log/dropping.md: three hours of one CPU core. Finished runs are skipped: run it again to resume.
set -euf
more="data=markov eval.by_position=false eval.variants=[] runs_dir=runs/dropping"
train() { python train.py $more "$@"; }
go_on() { # from the run $1, for a quarter of its steps
    run=$1
    shift
    train init_from="runs/dropping/$run" trainer.max_steps=100 optim.lr=1e-3 optim.warmup_steps=10 "$@"
}

for s in ${SEEDS:-0 1 2 3 4}; do
    for order in none key_offset conv; do
        with=""
        if [ $order = key_offset ]; then with="model.key_offset=true"; fi
        if [ $order = conv ]; then with="model.conv=4"; fi
        train pe=rope $with seed=$s name="rope-$order-s$s"
        go_on "rope-$order-s$s" pe=nope $with seed=$s name="dropped-$order-s$s"
        go_on "rope-$order-s$s" pe=rope $with seed=$s name="kept-$order-s$s"
        train pe=nope $with trainer.max_steps=500 seed=$s name="nope-$order-s$s"
    done
    two="pe=hybrid pe.pattern=[local,global] seed=$s" # RoPE in a window, then what sees everything
    train $two pe.global.pe=rope name="rope-window-s$s"
    go_on "rope-window-s$s" $two name="dropped-window-s$s"
    go_on "rope-window-s$s" $two pe.global.pe=rope name="kept-window-s$s"
    train $two trainer.max_steps=500 name="nope-window-s$s"
    memory="$two pe.local.pe=gated_delta pe.local.window=null" # the order by recurrence, in place of the window
    train $memory pe.global.pe=rope name="rope-memory-s$s"
    go_on "rope-memory-s$s" $memory name="dropped-memory-s$s"
    go_on "rope-memory-s$s" $memory pe.global.pe=rope name="kept-memory-s$s"
    train $memory trainer.max_steps=500 name="nope-memory-s$s"
done
