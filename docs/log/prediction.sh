# The runs of docs/log/prediction.md at 11M parameters, about a minute each on an H100, all arms with one seed before the
# next: bash docs/log/prediction.sh "corpus/**/*.py". Finished runs are skipped: run it again to resume. Then the verdict:
# python -m lab.board.prediction runs/prediction
set -euf
for seed in ${SEEDS-1 2 3}; do
    while read -r name options; do
        ${TRAIN:-python train.py} experiment=compare_gpu data=text "data.files=$1" eval.far_copies=false \
            eval.by_position=false eval.variants=[] $options seed=$seed runs_dir=runs/prediction \
            name=$name-s$seed ${MORE-}
    done <<'ARMS'
fox pe=fox
tenfold pe=fox pe.constant_gates=true optim.pe_lr_scale=10
kerple pe=kerple
rope pe=rope eval.variants=[yarn]
alibi pe=alibi
slopes pe=alibi pe.learned=true
half_rope_nope pe=half_rope_nope
profiles-conv pe=profiles pe.max_distance=511 model.conv=4
nape pe=nape
fox_rope pe=fox_rope
p_rope-ssmax pe=p_rope pe.proportion=auto pe.temperature=ssmax
ARMS
done
