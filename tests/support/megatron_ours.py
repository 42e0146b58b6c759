# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: importers of Megatron's `HybridDeviceOptimizer` get ours."""

import megatron.core.optimizer.cpu_offloading as theirs

from reference_impl.optimizers.megatron import HybridDeviceOptimizer

theirs.HybridDeviceOptimizer = HybridDeviceOptimizer
