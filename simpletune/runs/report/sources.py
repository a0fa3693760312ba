"""The parts of a run's report about its data sources and about what it trained on the text side."""

from __future__ import annotations

import os

from simpletune.adapters.files.describe import describe
from simpletune.adapters.methods.adapter import OUTPUT as LORA_FILE
from simpletune.adapters.text.files import embeddings_in
from simpletune.data.source_mix import SOURCE_COLUMNS, SourceShare, source_rows
from simpletune.runs.folder import DATA
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import RunData, read_object
from simpletune.system.options import Json, UserError


def source_sections(run: RunData) -> list[ReportSection]:
    """List what each of several sources contributed; yield nothing for one source or a run of an earlier version."""
    found = read_object(run.folder / DATA, run.notes, expected=False).get("sources", [])
    try:
        shares = [SourceShare(**{**share, "path": _shared(share["path"])}) for share in found]
        rows = source_rows(shares)
    except (TypeError, KeyError, ValueError, AttributeError):
        run.notes.append(f"{DATA} lists sources in an unknown form.")
        return []
    if len(shares) < 2:
        return []
    return [
        ReportSection(
            "sources", "Data sources", tables=[ReportTable("What an epoch consists of", SOURCE_COLUMNS, rows)]
        )
    ]


def text_sections(run: RunData) -> list[ReportSection]:
    """List a run's token vectors and text encoder updates; yield nothing if the text side did not train."""
    if run.config is None or not run.config.text.trains:
        return []
    section = ReportSection(
        "text-side", "Text side", [f"{each[0].upper()}{each[1:]}." for each in run.config.text.describe()]
    )
    result = run.folder / LORA_FILE
    for file in [*embeddings_in(run.folder), *([result] if result.is_file() else [])]:
        try:
            about = describe(file)
        except UserError as error:
            run.notes.append(f"{file.name} cannot be read: {error}")
            continue
        for each in about.get("embeddings", ()):
            head = ("encoder", "vectors", "width", "norms", "cosine with the first value")
            section.tables.append(ReportTable(f"{each['token']} in {file.name}", head, _vector_rows(each["encoders"])))
            section.notes += [
                f"{tool['tool']}: {'; '.join([tool['loads'], *tool['notes']])}." for tool in each["tools"]
            ]
        if counts := about.get("text_encoders"):
            rows = [(title, str(count)) for title, count in counts.items()]
            section.tables.append(ReportTable(f"Updates of text encoders in {file.name}", ("encoder", "layers"), rows))
    return [section]


def _vector_rows(encoders: Json) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(each["vectors"]),
            str(each["width"]),
            ", ".join(f"{norm:.3g}" for norm in each["norms"]),
            ", ".join(f"{cosine:.3f}" for cosine in each["cosines"]),
        )
        for name, each in encoders.items()
    ]


def _shared(path: str) -> str:
    """A path as a page may show it, without its parent folders."""
    return f"…/{os.path.basename(path.rstrip('/'))}" if os.path.isabs(path) else path
