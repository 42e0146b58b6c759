# SPDX-License-Identifier: Apache-2.0
"""The commands of `offload`: each parses its arguments, calls one function and renders the result.

Explained in docs/choosing.md. `plan_request` and `releases` hold the options that several commands share.

- command: a module with `add_arguments` and `run`, called like the module and loaded when it is called
- request: the options that describe a run, and the plan made from them
- target: the releases that an input is checked for, from `--target`, `--versions` or the input itself
"""
