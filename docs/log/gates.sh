# The runs of docs/log/gates.md: about two minutes of one CPU core each. Finished runs are skipped: run it again to resume.
# bash docs/log/gates.sh         the comparison: ARMS and SEEDS choose
# bash docs/log/gates.sh rates   the rates, on seeds of their own
set -euf
train() {
    ${TRAIN:-python train.py} data=markov eval.variants=[] eval.by_position=false 'eval.lengths=[1,8]' "$@"
}
options() { # of an arm
    case $1 in
        constant) echo pe=fox pe.constant_gates=true 'pe.decay_times=[0.5,128]' ;;
        fitted) echo pe=fox 'pe.decay_times=[0.5,128]' ;;
        slopes) echo pe=alibi pe.learned=true ;;
        tenfold) echo pe=fox pe.constant_gates=true optim.pe_lr_scale=10 ;;
        *) echo pe=$1 ;;
    esac
}

if [ "${1:-}" = rates ]; then
    for seed in ${SEEDS-100 101}; do
        for arm in ${ARMS-constant fitted slopes fox kerple}; do
            for rate in 1.5e-3x1 3e-3x1 6e-3x1 3e-3x10; do
                for switch in 0.0 0.01; do
                    train $(options $arm) seed=$seed data.switch=$switch optim.lr=${rate%x*} optim.pe_lr_scale=${rate#*x} \
                        runs_dir=runs/gates_rates name=$arm-rate-$rate-switch-$switch-s$seed
                done
            done
        done
    done
    exit
fi
for seed in ${SEEDS-0 1 2 3 4}; do
    for arm in ${ARMS-fox tenfold constant slopes fitted alibi kerple}; do
        train $(options $arm) seed=$seed runs_dir=runs/gates name=$arm-s$seed
        train $(options $arm) seed=$seed data.switch=0.01 runs_dir=runs/gates_switch name=$arm-s$seed
    done
done
