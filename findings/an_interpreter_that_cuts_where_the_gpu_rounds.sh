#!/usr/bin/env bash
# Triton's interpreter cuts fp32 to bf16 towards zero, where the compiled kernel rounds to nearest even.
#
# Expected: TRITON_INTERPRET=1 runs a kernel on the CPU with the numbers that a GPU would give, up to the order of sums. A
# cast to bf16 rounds to nearest even, as `tensor.to(torch.bfloat16)` and the GPU's `cvt.rn.bf16` do, and as the
# interpreter's own cast to fp16 does. Guess before the run: equal to torch in every bit.
# Happens: each bf16 result is the next one towards zero. Of 4,096 numbers in [1, 2) half are one unit lower than torch's,
# and their mean is half a unit too small. The largest fp32 becomes the largest bf16, not infinity, so an overflow that a
# GPU would have is not seen.
# Versions: triton 3.6.0 and 3.9.0, torch 2.13.0, CPU. Source: triton/runtime/interpreter.py, `cast_impl` and
# `_convert_float`, which rounds only where a rounding mode is passed; a plain `.to(tl.bfloat16)` passes none.
# Why it matters: the interpreter is how kernels are tested where CI has no GPU. A test there agrees with a kernel that cuts
# (weights that shrink in every step) and disagrees with one that rounds; a tolerance of one bf16 unit hides the bias.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat > "$folder/casts.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def cast(source, target, count: tl.constexpr):
    place = tl.arange(0, count)
    tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))


print("triton", triton.__version__, "torch", torch.__version__)
values = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 1
for dtype in (torch.float16, torch.bfloat16):
    found, expected = torch.zeros(4096, dtype=dtype), values.to(dtype)
    cast[(1,)](values, found, 4096)
    others = (found != expected).float().mean().item()
    units = ((found.double() - expected.double()).mean() / torch.finfo(dtype).eps).item()
    print(f"{dtype}: {others:.0%} are not torch's; the mean is off by {units:+.2f} units in the last place")
    if dtype == torch.float16:
        assert others == 0, "the behaviour has changed"
    else:
        assert 0.45 < others < 0.55 and -0.55 < units < -0.45, "the behaviour has changed"
        assert bool((found <= expected).all()), "the behaviour has changed"
largest, found = torch.full((1,), torch.finfo(torch.float32).max), torch.zeros(1, dtype=torch.bfloat16)
cast[(1,)](largest, found, 1)
print("the largest fp32 becomes", found.item(), "where torch says", largest.to(torch.bfloat16).item())
assert found.isfinite().item() and largest.to(torch.bfloat16).isinf().item(), "the behaviour has changed"
PY
for release in 3.6.0 3.9.0; do
    "$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy "triton==$release"
    TRITON_INTERPRET=1 "$folder/env/bin/python" -W ignore "$folder/casts.py"
done
