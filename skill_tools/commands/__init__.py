"""The commands of `offload`: each parses its arguments, calls one function and renders the result.

A module with `add_arguments` and `run` is a command, called like the module and loaded when it is called;
`plan_request` and `releases` hold the options that several commands share.
"""
