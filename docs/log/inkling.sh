# The runs of docs/log/inkling.md: two to four minutes of one CPU core each, 132 with three seeds. Finished runs are
# skipped: run it again to resume.
set -euf
train() { # on both kinds of chains: the folder's name ends as that of the chains
    for switch in ${SWITCHES-0.0 0.01}; do
        ${TRAIN:-python train.py} data=markov eval.variants=[] eval.by_position=false 'eval.lengths=[1,8]' \
            data.switch=$switch runs_dir=runs/inkling-$switch "$@"
    done
}

for seed in ${SEEDS-0 1 2}; do
    # The parts of Inkling: relative profiles or nothing, a sink, a short convolution, a norm of queries and keys.
    for pe in profiles nope; do
        for conv in null 4; do
            for sinks in false true; do
                for norm in true false; do
                    train pe=$pe model.conv=$conv model.sinks=$sinks model.qk_norm=$norm seed=$seed \
                        name=$pe-conv-$conv-sinks-$sinks-norm-$norm-s$seed
                done
            done
        done
    done
    # Its rivals; fox, kerple and constant gates have a page.
    train pe=half_rope_nope 'pe.pattern=[local,global]' seed=$seed name=half-rope-nope-s$seed
    train pe=clipped_rope seed=$seed name=clipped-rope-s$seed
    train pe=clipped_rope pe.temperature=ssmax seed=$seed name=clipped-rope-ssmax-s$seed
    train pe=p_rope pe.proportion=auto pe.temperature=ssmax seed=$seed name=p-rope-ssmax-s$seed
    for pe in fox kerple; do
        train pe=$pe model.conv=4 seed=$seed name=$pe-conv-s$seed
    done
done
