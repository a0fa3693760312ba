"""How were the tiny Stable Diffusion 3 and the two tiny encoders made that ship with the package? By these scripts.

``make tiny-sd3`` and ``make tiny-encoders`` repeat it from nothing.
"""

from __future__ import annotations
