"""What a run says when it is complete."""

from ropewalk.app.run_dir import RunDir, read_training
from ropewalk.report import page
from ropewalk.training.distributed import rank_zero_only


@rank_zero_only
def show_results(run: RunDir) -> None:
    """Print the results of a complete run, and write its page."""
    page.show(run.path, run.cfg)
    record = read_training(run.path)
    validation = record["validation"]
    losses = f"validation loss {validation['loss']:.4f} nats per token"
    if validation["bits_per_byte"] is not None:
        losses += f", {validation['bits_per_byte']:.3f} bits per byte"
    if validation["error"] is not None:
        losses += f", {validation['error']:.2f} % wrong"
    print(f"{losses}, on {validation['tokens']:,} tokens in windows of {validation['length']}")
    speed = f"{record['seconds']:.0f} s: {record['tokens_per_s']:,.0f} tokens/s"
    print(f"trained {record['steps']} steps, {record['tokens']:,} tokens in {speed}")
    print(f"to look at: {page.write_beside(run.path)}")
