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
    units = {
        "loss": "nats per token",
        "bits_per_byte": "bits per byte",
        "error": "% wrong",
    }
    loss = ", ".join(f"{validation[key]:.4f} {unit}" for key, unit in units.items() if validation[key] is not None)
    print(f"validation loss {loss}, on {validation['tokens']:,} tokens in windows of {validation['length']}")
    speed = f"{record['seconds']:.0f} s: {record['tokens_per_s']:,.0f} tokens/s"
    print(f"trained {record['steps']} steps, {record['tokens']:,} tokens in {speed}")
    print(f"to look at: {page.write_beside(run.path)}")
