"""A finished run as a public repository: what is uploaded, what is left out, and the upload itself.

import reincarnate

print(reincarnate.push("runs/breakout", "owner/breakout-student").url)
"""

from reincarnate.sharing.upload import Pushed, push

__all__ = ["Pushed", "push"]
