"""Images in prompts: the vision tower on its backend, and what the decoder takes from it.

`encoder` runs the vision tower's attention. `capture` reads what the model hands to its decoder.
`prompt` holds that for a request, `step` for a step, and `files` reads images from disk.
"""

from __future__ import annotations

from attnmux.transformers.images.prompt import PromptImages as PromptImages

__all__ = ["PromptImages"]
