# SPDX-License-Identifier: Apache-2.0
"""The streamed share: optimizer states that are kept on the host and copied to the GPU for their update.

Explained in docs/optimizer-state-offloading.md. The modules, from the bottom up: `chunks` (geometry), `packing` (states
in fewer bits), `halves_kernel` (hi/lo masters on a GPU), `formula_kernels` (formulas on a GPU), `rounded_kernel` (the
update of bf16 moments there), `compact` (moments in 8 bits), `compact_kernel` (their update on a GPU), `freed_memory`
(room for extra slots), `step` (the numbers of one step), `batches` (the matrices of one call), `muon_kernel`
(elementwise work of Muon on a GPU), `matrix_parts` (the matrices that it serves), `matrices` (their update), `update`
(the kernels of one chunk), `storage` (the chunks between steps), `pipeline` (copies and kernels in order) and `share`
(all of that as one). Terms:

- state: one fp32 number an element: a moment (`exp_avg`, ...), or the master weight of a parameter that is not fp32.
- member: a parameter as the optimizer knows it; piece: some consecutive elements of one member, in one chunk.
- chunk: the states of a few pieces in one flat tensor, which one copy moves and one kernel call updates.
- field: one state in a chunk, in the dtype that it is stored in. The fields of a chunk lie one after the other.
- state format: the states of a chunk, with their dtypes.
- packed state: one that is stored in fewer bits than fp32; scratch: device buffers to unpack states into.
- hi/lo master: a bf16 weight is the upper half of its fp32 master (hi), so only the lower half (lo) is stored and
  copied. A flag, in the sign of `exp_avg_sq`, says which way a tie was rounded.
- rounded moments: moments in bf16, rounded stochastically after each update; not bitwise torch's.
- compact states: moments in 8 bits with a scale for each 64 elements, and masters as the bf16 weight and 8 or 16 low
  bits; not bitwise torch's.
- storage: a chunk's pinned host memory (or device memory, for resident chunks) between steps.
- slot: a device buffer of one chunk. Three are permanent: one each for the copy in, the update and the copy out.
- extra slot: a temporary one, allocated during backward in memory that backward has freed (the page calls this
  memory borrowed).
- prefetch: to copy a chunk of the next step into a slot before that step begins.
- split member: one that the CPU updates in part. Its new streamed weights are kept apart until the CPU has updated
  its part too.
- queue: to give copies and kernels to their streams; the host does not wait for them.
"""
