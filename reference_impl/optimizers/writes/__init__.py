# SPDX-License-Identifier: Apache-2.0
"""Writes to weights by other code, shown neither by autograd's counter nor by an address.

- sum of a weight: 64 bits for each block of it, taken once it has been published and again before its next update.
- to take over: to set a master to its weight where the weight is not the master rounded.

The CPU's share and the device's shares both use it; it imports neither. Explained in
docs/optimizer-offloading.md, "Writing weights yourself".
"""
