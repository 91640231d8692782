# The runs of docs/log/qk_norm.md: about three hours of one CPU core. Finished runs are skipped: run it again to resume.
# Seeds that an archive has can be left out, as in SEEDS="3 4"; then gather the archive with the new runs:
# python docs/results.py qk_norm docs/results/qk_norm.parquet runs/qk_norm
set -euf
markov() { python train.py -m data=markov model.key_offset=true eval.by_position=false "$@"; }
code() { python train.py -m experiment=compare eval.by_position=false eval.far_copies=false "$@"; }
cells() { # the program, the seed, the folder
    for norm in true false; do
        one="seed=$2 model.qk_norm=$norm runs_dir=runs/$3"
        "$1" $one pe=rope 'eval.variants=[{pe: rope, temperature: log}]' name="rope-norm-$norm-s$2"
        "$1" $one pe=p_rope pe.proportion=auto 'eval.variants=[{pe: p_rope, temperature: log}]' \
            name="p_rope-norm-$norm-s$2"
        "$1" $one pe=rope pe.temperature=ssmax 'eval.variants=[]' name="rope-ssmax-norm-$norm-s$2"
        "$1" $one pe=p_rope pe.proportion=auto pe.temperature=ssmax 'eval.variants=[]' \
            name="p_rope-ssmax-norm-$norm-s$2"
    done
}

for seed in ${SEEDS:-0 1 2 3 4}; do cells markov $seed qk_norm; done
# Whether 3e-3, chosen with the norm, is a rate for networks without it.
for rate in 1.5e-3 6e-3; do
    markov seed=0 pe=rope model.qk_norm=true,false optim.lr=$rate 'eval.lengths=[1]' eval.sequences=64 'eval.variants=[]' \
        "name='rope-norm-\${model.qk_norm}-rate-$rate'" runs_dir=runs/qk_norm_rates
done
for seed in ${CODE_SEEDS:-0 1 2}; do cells code $seed qk_norm_code; done
