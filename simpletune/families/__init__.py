"""Model families: the sources of their weights, their parts, shapes and operations; the union of ``model.family``.

A new family takes a folder here and a line in ``Model``. Its option gives data and pure functions, so that no other
package asks for a family's name. May import objectives, models and what is below them. Adapters, data and the packages
above may import this one; a family imports no other.
"""

from __future__ import annotations

from simpletune.families.sd3.option import SD3

Model = SD3
"""The type of ``model``; a union discriminated by ``family`` once there are two families."""
