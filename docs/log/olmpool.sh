# The runs of docs/log/olmpool.md: six hours of one CPU core. Finished runs are skipped: run it again to resume.
set -euf
more="experiment=compare eval.by_position=false eval.variants=[] runs_dir=runs/olmpool"
declare -A number=([four]=4 [one]=1) # in words, as the digit 1 in a name could be the seed
for seed in ${SEEDS:-0 1 2}; do
    for length in 128 32; do
        for norm in false true; do
            for heads in four one; do
                for window in none quarter; do
                    name="length-$length-norm-$norm-heads-$heads-window-$window-s$seed"
                    net="seed=$seed model.qk_norm=$norm model.n_kv_head=${number[$heads]}"
                    first="pe=rope"
                    then="pe=yarn ++pe.scale=$((512 / length))"
                    if [ $window = quarter ]; then
                        pattern="pe=hybrid pe.local.window=$((length / 4))"
                        first="$pattern pe.global.pe=rope"
                        then="$pattern pe.global.pe=yarn +pe.global.scale=$((512 / length))"
                    fi
                    python train.py $more $net $first train_len=$length trainer.batch_size=$((2048 / length)) \
                        'eval.lengths=[1]' eval.far_copies=false name="$name"
                    python train.py $more $net $then train_len=512 trainer.batch_size=4 trainer.max_steps=60 optim.lr=1e-3 \
                        optim.warmup_steps=6 'eval.lengths=[0.25,0.5,1]' eval.target_tokens=32 \
                        init_from="runs/olmpool/$name" name="extended-$name"
                done
            done
        done
    done
done
