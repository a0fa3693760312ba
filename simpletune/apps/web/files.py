"""Send files of a run."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from simpletune.apps.web.roots import Roots


def file_response(roots: Roots, folder: Path, name: str, **headers: str) -> Response:
    """Send a file below a run's folder.

    Args:
        roots: what the pages may touch.
        folder: the folder that must contain the file, links resolved.
        name: relative path.
        headers: additional headers.

    Raises:
        HTTPException: 404.
    """
    file = roots.inside(folder, name)
    if file is None:
        raise HTTPException(404)
    return FileResponse(file, headers=headers)
