# The runs of docs/log/causes.md: two minutes of one CPU core each, 60 in all. Finished runs are skipped: run it again to
# resume. They are four cells of docs/log/qk_norm.sh with other seeds.
set -euf
for seed in ${SEEDS-5 6 7 8 9 10 11 12 13 14 15 16 17 18 19}; do
    for cell in rope p_rope rope-ssmax p_rope-ssmax; do
        with="pe=${cell%-ssmax}"
        if [ ${cell%-ssmax} = p_rope ]; then with="$with pe.proportion=auto"; fi
        if [ ${cell%-ssmax} != $cell ]; then with="$with pe.temperature=ssmax"; fi
        ${TRAIN:-python train.py} data=markov model.key_offset=true eval.variants=[] eval.by_position=false \
            'eval.lengths=[1,8]' $with seed=$seed runs_dir=runs/causes name=$cell-norm-true-s$seed
    done
done
