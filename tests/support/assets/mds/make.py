"""Write the shards of this folder with mosaicml-streaming's own writer, in an environment of its own.

    python3 -m venv /tmp/mds && /tmp/mds/bin/pip install mosaicml-streaming==0.13.0 torchvision
    /tmp/mds/bin/python tests/assets/mds/make.py

Without torchvision and cloud packages, which writing does not use, ``--stubs`` puts empty modules in their place.
"""

import io
import shutil
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

if "--stubs" in sys.argv:

    class Stubs(MetaPathFinder, Loader):
        """Makes up packages that are imported and not used."""

        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            return ModuleSpec(name, self, is_package=True) if top in ("torchvision", "boto3", "botocore") else None

        def create_module(self, spec):
            made = MagicMock(__path__=[], VisionDataset=object)
            made.__spec__ = spec
            return made

        def exec_module(self, module):
            pass

    sys.meta_path.append(Stubs())

import numpy as np
from PIL import Image
from streaming import MDSWriter

HERE = Path(__file__).resolve().parent
COLUMNS = {"image": "bytes", "text": "str", "width": "int", "height": "int32", "tags": "json", "score": "float32"}
FORMS = {
    "plain": {"hashes": ["sha1", "xxh64"]},
    "zstd": {"compression": "zstd:3", "hashes": ["sha256"]},
    "gz": {"compression": "gz:6", "hashes": ["md5"]},
    "bare": {},
}


def image(number: int) -> tuple[bytes, tuple[int, int]]:
    """A picture of one colour with a bright square, as PNG bytes, and its size; tests draw it again."""
    size = (96, 32) if number % 3 == 2 else (32, 32)
    pixels = np.full((size[1], size[0], 3), (20 * number + 5, 240 - 20 * number, 90), dtype=np.uint8)
    pixels[number : number + 8, 8:16] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue(), size


def main() -> None:
    for form, options in FORMS.items():
        shutil.rmtree(HERE / form, ignore_errors=True)
        with MDSWriter(out=str(HERE / form), columns=COLUMNS, size_limit=1000, **options) as out:
            for number in range(8):
                data, (width, height) = image(number)
                caption = f"picture {number}, größer" if number == 5 else f"picture {number}"
                tags = [f"picture {number}", f"number {number}"]
                out.write({
                    "image": data, "text": caption, "width": width, "height": np.int32(height), "tags": tags,
                    "score": np.float32(number),
                })  # fmt: skip


if __name__ == "__main__":
    main()
