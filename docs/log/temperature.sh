# The runs of docs/log/temperature.md: two hours of one CPU core a seed. Finished runs are skipped: run it again to resume.
set -euf
factors="0.8 0.9 1.1 1.2 1.35 1.5 1.75 2.0 2.5"
for seed in ${SEEDS:-0}; do
    for chain in symbols=5 symbols=10 symbols=40 symbols=5,order=2 symbols=10,order=2; do
        for switch in 0.0 0.01; do
            data="data=markov data.switch=$switch"
            for option in ${chain//,/ }; do data="$data data.$option"; done
            for pe in nope rope p_rope; do
                with="pe=$pe"
                if [ $pe = p_rope ]; then with="pe=p_rope pe.proportion=auto"; fi
                variants=""
                for factor in $factors; do variants="$variants,{pe: $pe, temperature: $factor}"; done
                python train.py $data $with model.conv=4 seed=$seed 'eval.lengths=[1,2,4,8,16]' eval.sequences=256 \
                    eval.by_position=false "eval.variants=[${variants#,}]" runs_dir=runs/temperature \
                    name="$pe-${chain//[=,]/-}-switch-$switch-s$seed"
            done
        done
    done
done
