# SPDX-License-Identifier: Apache-2.0
"""Products of stacks whose bits are those of one product after the other, as GPUs make them and CPUs do not quite."""

import torch

from reference_impl.optimizers.streamed import batches


def one_by_one(set_attribute=setattr):
    """Let products of stacks be products of their matrices, and run; return the lengths of the stacks, as they come."""
    lengths, whole_bmm, whole_baddbmm = [], torch.bmm, torch.baddbmm

    def bmm(one, other, *, out):
        if out.is_meta:
            # Only bytes are counted there, and each product of a matrix would take a millisecond.
            whole_bmm(one, other, out=out)
            return
        lengths.append(len(out))
        for a, b, c in zip(one, other, out, strict=True):
            torch.mm(a, b, out=c)

    def baddbmm(added, one, other, *, beta, alpha=1, out):
        if out.is_meta:
            whole_baddbmm(added, one, other, beta=beta, alpha=alpha, out=out)
            return
        for d, a, b, c in zip(added, one, other, out, strict=True):
            torch.addmm(d, a, b, beta=beta, alpha=alpha, out=c)

    set_attribute(torch, "bmm", bmm)
    set_attribute(torch, "baddbmm", baddbmm)
    set_attribute(batches, "has_batches", lambda device: True)
    # Of toys too.
    set_attribute(batches, "_TRIED_ELEMENTS", 1)
    return lengths
