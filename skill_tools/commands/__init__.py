"""The commands of `offload`: each parses its arguments, calls one function and renders the result."""
