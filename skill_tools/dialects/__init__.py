# SPDX-License-Identifier: Apache-2.0
"""One object a framework: the form and composition of its files, its plans, and its changes.

Nothing outside this folder and the data in `knowledge/` names a framework; other code asks `registry` for the object.
Explained in docs/design.md; CONTRIBUTING.md says how to add a framework.

- dialect: the language of a framework's users; an object of a subclass of `base.Dialect`, called by `name`
- evidence: names in an input that only one framework would use; the strongest proof decides the input's framework
- compose: to merge inputs (recipe, files, overrides) in the framework's own precedence into one `Config`
- run: one training run as a plan sees it; a dialect builds it from a configuration, a shape and GPUs
- mode: the tensors that a run moves off the GPU, and the recomputed ones
- candidate: one way to fit: a mode, and the settings that switch it on in the framework's own keys
- patch: the change that a plan proposes, as the user would write it
- advice: a planner's knowledge of the machine, for dialects with candidates that depend on it
"""
