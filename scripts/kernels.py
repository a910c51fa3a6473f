"""Compare the attention kernels over lengths: whether they agree, and the time of forward and backward pass."""

import tyro

from train.command_line import exit_with

COLUMNS = ("tokens", "kernel", "forward ms", "and backward ms", "out", "gradients", "statistics", "agrees", "gives")


def line(row: dict) -> str:
    numbers = [f"{row[key]:.4g}" for key in ("forward_ms", "both_ms", "out", "gradients", "statistics") if key in row]
    told = [row["failed"]] if "failed" in row else [*numbers, "yes" if row["agrees"] else "NO", " ".join(row["gives"])]
    return " | ".join((f"| {row['batch']} x {row['length']}", row["kernel"], *told)) + " |"


def main() -> int:
    from train.kernel_table import Table, here, measure

    table, agrees = tyro.cli(Table, description=__doc__, prog="python -m scripts.kernels"), True
    print(f"{here()}. {table.heads} heads of {table.head_width} over {table.kv_heads}, window {table.window}, {table.dtype}; "
          "medians; errors in roundings of that type.")
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for row in measure(table):
        agrees = agrees and row.get("agrees", True)
        print(line(row), flush=True)
    return 0 if agrees else 1


if __name__ == "__main__":
    exit_with(main)
