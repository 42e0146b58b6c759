# SPDX-License-Identifier: Apache-2.0
"""The old name of `reference_impl.verification`, kept for one release.

Documents and examples of release 0.1 imported the small decoder, its adapters and `apply_plan` from here. The old paths
give the very same objects, with a DeprecationWarning at the first import. This package goes with the next release.
"""

import sys
import warnings

from reference_impl.verification import apply, model

lora = model
for _name, _module in {"apply": apply, "lora": lora, "model": model}.items():
    sys.modules[f"{__name__}.{_name}"] = _module

warnings.warn(
    "reference_impl.training is reference_impl.verification now, and add_lora is in its module model; expected imports "
    "from there; try reference_impl.verification.model, or `from reference_impl import apply_plan`",
    DeprecationWarning,
    stacklevel=2,
)
