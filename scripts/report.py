"""Compare the runs of a sweep: writes report.html, report.md, results.csv and the figures into its folder."""

import sys
from pathlib import Path

from configs.load import UserError
from train.command_line import exit_with


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(f"usage: python -m scripts.report runs/SWEEP\n\n{__doc__}")
            return 0
        raise UserError("usage: python -m scripts.report runs/SWEEP")
    from train.ablation.report import report

    folder = Path(sys.argv[1])
    print("\n".join(report(folder)))
    print(folder / "report.html")
    return 0


if __name__ == "__main__":
    exit_with(main)
