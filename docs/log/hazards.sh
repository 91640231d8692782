# The runs of docs/log/hazards.md: two to three minutes of one CPU core each, 180 in all. Finished runs are skipped: run
# it again to resume. bash docs/log/hazards.sh content: more steps and layers; bash docs/log/hazards.sh lags: 6,400 steps.
set -euf
train() {
    ${TRAIN:-python train.py} data=markov eval.by_position=false 'eval.lengths=[1,8]' "$@"
}
options() { # of an encoding
    case $1 in
        constant) echo pe=fox pe.constant_gates=true 'pe.decay_times=[0.5,128]' eval.variants=[] ;;
        window-nope) echo pe=hybrid 'pe.pattern=[local,global]' eval.variants=[] ;;
        rope) echo pe=rope eval.variants=[yarn] ;;
        *) echo pe=$1 eval.variants=[] ;;
    esac
}

if [ "${1:-}" = content ]; then
    for seed in ${SEEDS-0 1 2}; do
        for arm in fox constant rope; do
            with="$(options $arm) seed=$seed data.switch=0.01 runs_dir=runs/content"
            train $with trainer.max_steps=1600 name=$arm-longer-s$seed
            train $with model.n_layer=4 name=$arm-deeper-s$seed
        done
    done
    exit
fi
if [ "${1:-}" = lags ]; then
    for seed in ${SEEDS-0 1}; do
        for arm in rope fox kerple fox_rope; do
            train $(options $arm) seed=$seed data.lag=4 data.switch=0.0 trainer.max_steps=6400 runs_dir=runs/lags \
                name=$arm-lag-4-6400-s$seed
        done
    done
    exit
fi
for seed in ${SEEDS-0 1 2}; do
    for lag in ${LAGS-1 16 4}; do
        hazards="0.0 0.002 0.01 0.02"
        if [ $lag = 1 ]; then hazards="0.0005 0.002 0.005 0.02"; fi # 0 and 0.01 have pages
        for switch in ${HAZARDS-$hazards}; do
            for arm in fox constant kerple window-nope rope; do
                train $(options $arm) seed=$seed data.lag=$lag data.switch=$switch runs_dir=runs/hazards \
                    name=$arm-lag-$lag-switch-$switch-s$seed
            done
        done
    done
done
