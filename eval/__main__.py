"""`python -m eval`: the quickstart's table and figures from records, by default those that come with the project."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eppo.interrupts import exit_code, starting

ROOT = Path(__file__).resolve().parent.parent
FIGURES = (1, 3, "clip")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="run folders; without any, those that come with the project")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="gets tables/ and figures/ (default: results)")
    options = parser.parse_args(arguments)
    print("reading records, drawing figures", flush=True)
    with starting():                                        # pandas and matplotlib: seconds
        from matplotlib import pyplot as plt

        from eval.figures import draw, save
        from eval.runs import SHIPPED, load, rows_of, shipped
        from eval.tables import render
    folders = options.records or shipped()
    if not folders:
        print(f"no records below {SHIPPED.relative_to(ROOT)}/quickstart; make reproduce produces some, or name run folders")
        return 1
    plt.switch_backend("Agg")
    try:
        runs = load(folders)
        evaluated = len(rows_of(runs)) > 0
        for number in (*FIGURES, "success") if evaluated else FIGURES:
            print(*save(draw(number, runs), options.out / "figures" / f"figure_{number}", runs), sep="\n")
        if evaluated:
            render("quickstart", runs, options.out / "tables")
            print(options.out / "tables" / "table_quickstart.md")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
