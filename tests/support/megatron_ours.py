# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: what imports Megatron's `HybridDeviceOptimizer` gets ours."""

import megatron.core.optimizer.cpu_offloading as theirs

from reference_impl.optimizers.megatron import HybridDeviceOptimizer

theirs.HybridDeviceOptimizer = HybridDeviceOptimizer
