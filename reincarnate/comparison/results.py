"""The files of a comparison: ``compare.json``, ``compare.csv``, pictures and ``compare.html``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reincarnate import files
from reincarnate.comparison import hparams, pages, pictures
from reincarnate.comparison.cells import Outcome
from reincarnate.comparison.references import Reference
from reincarnate.report.plots import save_figure
from reincarnate.wording import encodable


def write(
    folder: Path,
    document: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    references: Sequence[Reference] = (),
) -> list[Path]:
    """Write everything into ``folder``; returns the files, without those for TensorBoard."""
    files.write_json(folder / "compare.json", document)
    files.write_bytes(folder / "compare.csv", encodable(csv_of(document)).encode())
    written = [folder / "compare.json", folder / "compare.csv"]
    drawn: dict[str, Path] = {}
    for name, figure in pictures.figures(document, outcomes, references):
        saved = save_figure(figure, folder / name)
        drawn[name] = saved[0]
        written += saved
    html = folder / "compare.html"
    page = pages.page(document, {name: path.read_bytes() for name, path in drawn.items()})
    files.write_bytes(html, encodable(page).encode())
    hparams.write(folder, document, outcomes)
    return [*written, html]


def cell_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cells with flat names: ``agent_steps_to_0.5`` and so on."""
    rows = []
    for cell in document["cells"]:
        row: dict[str, Any] = {}
        for name, value in cell.items():
            if isinstance(value, Mapping):
                row |= {f"{name}_{share}": number for share, number in value.items()}
            else:
                row[name] = value
        rows.append(row)
    return rows


def csv_of(document: Mapping[str, Any]) -> str:
    """One line per cell; what is missing is empty."""
    rows = cell_rows(document)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
