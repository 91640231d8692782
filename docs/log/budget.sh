# The runs of docs/log/budget.md, in the folder corpus that docs/log/large.md makes: three hours of one CPU core.
# Finished runs are skipped: run it again to resume.
set -euf
more="experiment=compare data=text data.files=corpus/**/*.py data.tokenizer=train:1024 model.n_layer=2 model.dim=64
    model.n_head=2 optim.schedule=wsd eval.by_position=false eval.variants=[] eval.lengths=[1] eval.far_copies=false
    runs_dir=runs/budget"
for seed in ${SEEDS:-0 1 2}; do
    for net in ${NETS:-rope rope-conv nope-conv fox}; do
        with="seed=$seed pe=${net%-conv}"
        if [ $net != ${net%-conv} ]; then with="$with model.conv=4"; fi
        for times in ${TIMES:-1 4 16}; do
            # The rate stays constant for 280 steps and more; each branch decays for a quarter of what it has had.
            # The stem has gone on since a branch that is complete left it.
            if [ -f "runs/budget/$net-$times-s$seed/training.json" ]; then continue; fi
            ${TRAIN:-python train.py} $more $with trainer.max_steps=$((280 * times)) optim.decay_share=0 \
                name="stem-$net-s$seed"
            ${TRAIN:-python train.py} $more $with trainer.max_steps=$((70 * times)) optim.decay_share=1 \
                optim.warmup_steps=0 init_from="runs/budget/stem-$net-s$seed" init_optimizer=true \
                name="$net-$times-s$seed"
        done
    done
done
