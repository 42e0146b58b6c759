# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of offloading, written once: `reference_impl` offloads by it, and `skill_tools` plans with it.

- sizes: lengths of buffers and chunks, and shares of a budget: defaults of `reference_impl`, facts for plans
- states: bytes of an element's states, by their form
- update_time: the seconds of an update, and the split that needs the fewest
- residency: the frozen weights that stay on the device, and those that are pinned
- division: the elements of each parameter that stay, stream, or are updated on the CPU

Plain numbers alone: it imports neither package, nothing beyond the standard library, and no torch.
"""
