# The runs of docs/log/drops.md: 400, 1,600 and 6,400 steps after RoPE was dropped, and as many with it: four hours of one
# CPU core. Finished runs are skipped: run it again to resume.
set -euf
train() {
    ${TRAIN:-python train.py} data=markov eval.by_position=false eval.variants=[] 'eval.lengths=[1,8]' \
        runs_dir=runs/drops "$@"
}
for seed in ${SEEDS-0 1 2}; do
    train pe=rope seed=$seed name=rope-s$seed
    for steps in 400 1600 6400; do
        for pe in nope rope; do
            train init_from=runs/drops/rope-s$seed trainer.max_steps=$steps optim.lr=1e-3 optim.warmup_steps=10 pe=$pe \
                seed=$seed name=then-$pe-$steps-s$seed
        done
    done
done
