"""What it costs: seconds of a step on a machine."""
