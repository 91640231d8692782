"""Draw what encodings do: turns of each pair of a rotation, scores by distance; with run=, a trained run's attention.

python scripts/draw.py 'encodings=[rope,yarn,llama3,cope]'
python scripts/draw.py 'encodings=[{pe: llama3, base: 500000, scale: 8}]' head_dim=128 train_len=8192 length=65536
python scripts/draw.py run=runs/cope-code 'formats=[html,png]'
python scripts/draw.py out=docs/pictures 'formats=[svg]'           the pictures of docs/positions.md
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.draw")

from lab.pictures.gallery import Arguments, write


def main(args: Arguments) -> None:
    write(args)
