"""The share whose state lives on the host and visits the device for its update."""
